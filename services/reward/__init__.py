"""The reward service: verifies responses against gold answers, in processes that can be killed."""
