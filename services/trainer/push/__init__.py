"""Weight pushes: from the trainer to every live replica, verified, each stage with a deadline."""
