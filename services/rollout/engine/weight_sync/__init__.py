"""The receiving side of a push, in the engine's own process."""
