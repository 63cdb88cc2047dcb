"""The servers of Penstock. A service imports penstock and itself, never another service."""
