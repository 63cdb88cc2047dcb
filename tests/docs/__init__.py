"""Runs the code blocks of the pages as a reader would: `make test-docs`."""
