"""The trainer: feeds prompts through the gate, collects groups, trains and pushes weights."""
