"""What computes: model, log-probabilities, optimizer, optimizer step, export of weights."""
