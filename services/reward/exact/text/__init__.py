"""Texts of answers, before they are read as values: where they are, how they are written."""
