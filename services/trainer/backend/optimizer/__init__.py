"""The optimizer: weights, averages, learning rates and their schedule."""
