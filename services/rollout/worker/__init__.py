"""The rollout worker: plays the episodes of a prompt group and publishes the finished group once."""
