"""Reports a run: metrics, curves, episodes, and its state over gRPC."""
