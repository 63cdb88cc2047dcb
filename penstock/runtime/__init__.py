"""Process lifecycle: signals, ports, health, access control."""
