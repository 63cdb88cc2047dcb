"""The rollout engine: one SGLang engine behind gRPC."""
