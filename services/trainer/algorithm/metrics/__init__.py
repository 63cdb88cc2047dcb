"""Metrics of an optimizer step."""
