"""How callers reach the router: gRPC, and HTTP as OpenAI's clients speak it."""
