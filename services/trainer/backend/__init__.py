"""The part of the trainer that computes: model, log-probabilities, optimizer, optimizer step, export of weights."""
