"""The command line: `penstock train`, `penstock serve`, `penstock config`, `penstock version`."""

from penstock.runtime.imports import kept_for_ever

with kept_for_ever():
    from services.cli.app import main

__all__ = ["main"]
