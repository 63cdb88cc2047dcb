"""Model families: what a family knows about itself, one file each."""
