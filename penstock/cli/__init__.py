"""The command line: `penstock train`, `penstock serve`, `penstock config`, `penstock version`."""

from penstock.cli.app import main

__all__ = ["main"]
