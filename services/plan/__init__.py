"""What `penstock plan` calculates: the memory that a recipe takes on GPUs that need not be here."""
