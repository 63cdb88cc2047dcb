"""Plays one sample: turns of the policy and answers of its environment, within its budget and time."""
