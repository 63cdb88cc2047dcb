"""The durable bus: NATS JetStream work queues for prompts and groups, and KV buckets for leases and versions."""
