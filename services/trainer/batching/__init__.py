"""From groups to what the model reads: sequences, images, micro-batches."""
