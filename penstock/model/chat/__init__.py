"""Conversations of a model: its chat template, and what its policy writes: turns, reasoning, calls of tools."""
