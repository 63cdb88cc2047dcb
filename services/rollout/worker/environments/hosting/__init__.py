"""Environments that run outside the worker: in a process for each episode, or behind a server."""
