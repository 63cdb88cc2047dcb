"""gRPC: how every server starts, drains and answers for errors, and how every client connects."""
