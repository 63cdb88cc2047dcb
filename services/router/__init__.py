"""The router: one address for a pool of rollout engines."""
