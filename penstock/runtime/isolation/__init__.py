"""Processes that run untrusted code: forked from a warm one, confined, limited and killed from outside."""
