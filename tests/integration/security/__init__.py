"""Who is let in, by token and TLS, to NATS and to every server."""
