"""The worker among real neighbours."""
