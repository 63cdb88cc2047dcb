"""Penstock's metrics in a real Prometheus: `make test-observability`."""
