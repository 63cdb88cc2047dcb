"""The policy: the model, its attention over packed rows, and its log-probabilities."""
