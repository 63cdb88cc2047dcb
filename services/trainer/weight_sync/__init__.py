"""Publication of weights: from the trainer to every live replica, verified, with a deadline for each stage."""
