"""Commands of `penstock`, run as a person would."""
