"""The command line: `penstock train`, `penstock serve`, `penstock config`, `penstock version`."""

from services.cli.app import main

__all__ = ["main"]
