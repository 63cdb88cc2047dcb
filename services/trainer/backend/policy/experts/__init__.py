"""Mixtures of experts: their computation, divided among ranks or not, and replayed routes."""
