"""The bus on a real nats-server: streams, leases, locks, images, and connections that break."""
