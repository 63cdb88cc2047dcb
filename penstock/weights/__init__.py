"""Formats in which weights travel: what trainer and engine must agree on, byte for byte."""
