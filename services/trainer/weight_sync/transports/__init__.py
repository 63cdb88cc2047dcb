"""Transports of a push's bytes: one module each, named as in `trainer.weight_sync.transport`."""
