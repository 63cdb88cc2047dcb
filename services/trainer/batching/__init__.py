"""Turns groups into model inputs: sequences, images, positions, packed rows."""
