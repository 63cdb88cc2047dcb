"""`penstock train`."""
