"""What a NATS server keeps of runs, and how a person sees and repairs it."""
