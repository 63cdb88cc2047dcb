"""From groups to what the model reads: sequences, images, positions, packed rows."""
