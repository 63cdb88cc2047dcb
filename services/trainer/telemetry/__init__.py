"""Reports a run: metrics, curves, sample episodes, and its state over gRPC."""
