"""gRPC: how servers start, drain and report errors, and how clients connect."""
