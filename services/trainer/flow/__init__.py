"""What flows through the trainer: admission, collection, and the choice of each batch."""
