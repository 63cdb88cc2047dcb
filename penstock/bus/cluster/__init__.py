"""Several nats-servers that store a run together: creating replicated streams, and leaving a server that is cut off."""
