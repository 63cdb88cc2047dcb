"""The life of a process: signals, ports, health, access control."""
