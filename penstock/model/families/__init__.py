"""Facts about each model family, one file per family."""
