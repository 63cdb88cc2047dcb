"""Leases, locks and registers in NATS key-value buckets, and watches on them."""
