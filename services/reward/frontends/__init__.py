"""The service's interfaces to callers: gRPC and HTTP/JSON, over the same verifier."""
