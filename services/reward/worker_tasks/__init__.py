"""The tasks of worker processes. Runs only in workers: it may take any time and any memory."""
