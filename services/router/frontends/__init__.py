"""The router's interfaces to callers: gRPC, and HTTP in OpenAI's format."""
