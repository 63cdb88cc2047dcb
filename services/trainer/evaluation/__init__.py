"""Evaluation: plays and judges named sets of prompts, and summarises the results."""
