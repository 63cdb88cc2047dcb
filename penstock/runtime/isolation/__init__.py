"""Processes that run what nobody vouches for: forked from a warm one, confined, limited and killed from outside."""
