"""What a row says: its messages, images and gold answers."""
