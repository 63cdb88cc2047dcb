"""The reward service: judges responses against gold answers, in processes that can be killed."""
