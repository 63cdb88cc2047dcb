"""How the bytes of a push travel: one module per transport, named as in `trainer.weight_sync.transport`."""
