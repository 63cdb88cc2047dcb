"""Prompts to the bus and groups from it."""
