"""Evaluation: named sets of prompts that are played and judged, and what they say of a policy."""
