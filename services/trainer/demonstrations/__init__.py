"""Demonstrations that a reinforcement learning run learns beside its groups."""
