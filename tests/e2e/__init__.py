"""Whole runs: `penstock train` with every real process."""
