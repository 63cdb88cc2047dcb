"""The tiny model: how it is built, how it was taught, and its checkpoint."""
