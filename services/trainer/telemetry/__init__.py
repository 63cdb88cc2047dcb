"""What a run reports: metrics, curves, sample episodes, and its state over gRPC."""
