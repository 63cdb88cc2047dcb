"""The life of a process: signals, ports, health, who is let in."""
