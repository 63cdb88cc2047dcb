"""Sends prompts to the bus and takes groups from it."""
