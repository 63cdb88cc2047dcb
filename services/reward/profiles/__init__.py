"""The profiles: named ways to judge, of which a caller picks one per item."""
