"""What the host has."""
