"""What processes measure and record of themselves."""
