"""Runs on real Ray clusters of several nodes on one machine: `make test-ray`."""
