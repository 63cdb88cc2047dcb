"""`penstock score`: judges the lines of a file."""
