"""Environments that run apart from the worker: in a process for each episode, or behind a server."""
