"""`penstock score`: verdicts on lines of a file."""
