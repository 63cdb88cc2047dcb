"""HTTP: how every server starts, drains and answers for errors."""
