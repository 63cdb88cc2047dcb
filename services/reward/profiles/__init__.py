"""The profiles: named ways to verify. A caller picks one for each item."""
