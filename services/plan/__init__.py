"""Calculations of `penstock plan`: the memory that a recipe takes on GPUs, which need not be present."""
