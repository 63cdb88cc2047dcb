"""Converts parts of requests for engines and templates."""
