"""Work queues: messages that one process at a time has in hand, and what becomes of each."""
