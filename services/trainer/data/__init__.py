"""Data sets the trainer can feed: each yields rows in the schema of geo3k."""
