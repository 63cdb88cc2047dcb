"""What an optimizer step changes, and by how much: weights, averages, rates and their schedule."""
