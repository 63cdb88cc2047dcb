"""The reward service over gRPC and HTTP, and its workers."""
