"""Supervised training: the trainer's model, packing, optimizer and checkpoints, without bus and engines."""
