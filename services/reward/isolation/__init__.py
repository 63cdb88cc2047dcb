"""Processes that can be killed: one item at a time in each, with limits on time, memory and access."""
