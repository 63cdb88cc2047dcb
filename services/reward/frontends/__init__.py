"""How callers reach the service: gRPC and HTTP/JSON, over the same verifier."""
