"""The profiles: named ways to verify, of which a caller picks one per item."""
