"""The policy that is trained: groups to tensors, forward passes, optimizer steps, checkpoints."""
