"""What others rely on byte for byte: messages on the wire and records on the bus."""
