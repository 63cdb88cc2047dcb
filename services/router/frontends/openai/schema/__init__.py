"""Models of requests."""
