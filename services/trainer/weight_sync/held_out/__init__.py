"""Replicas that are held out of pushes for an evaluation."""
