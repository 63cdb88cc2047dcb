"""Environments: what answers a turn."""
