"""What a run tells people: metrics, curves, sample episodes, and its state over gRPC."""
