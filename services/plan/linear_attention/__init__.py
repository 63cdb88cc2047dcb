"""What linear attention adds to plans: states of engines, and activations of the trainer."""
