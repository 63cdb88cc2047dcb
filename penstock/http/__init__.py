"""HTTP servers: start, drain and error responses."""
