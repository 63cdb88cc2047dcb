"""Readers: one file of each format to rows."""
