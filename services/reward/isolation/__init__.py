"""Processes that can be killed: one item at a time in each, under limits of time, memory and reach."""
