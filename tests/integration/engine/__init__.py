"""Rollout engines, most of them with real SGLang: answers, streams, pushes of weights, and their ends."""
