"""Evaluations within a run and over an API, and replicas that are held out for them."""
