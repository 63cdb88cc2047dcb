"""What processes measure."""
