"""What processes record of themselves."""
