"""Slots: the calls that a replica may have in flight, who gets one, and who waits for it."""
