"""The command line; `app` lists its commands."""

from penstock.runtime.imports import kept_for_ever

with kept_for_ever():
    from services.cli.app import main

__all__ = ["main"]
