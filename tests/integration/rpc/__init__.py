"""Servers and clients over real connections: gRPC, HTTP and their ports."""
