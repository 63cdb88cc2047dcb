"""Environments, which answer the policy's turns."""
