"""Reads the contents of rows: messages, images and gold answers."""
