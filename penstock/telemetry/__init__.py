"""Log, metrics and traces of every process."""
