"""Readers: each reads files of one format as rows."""
