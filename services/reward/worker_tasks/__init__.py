"""What worker processes do with an item. Runs in workers only: it may take any time and any memory."""
