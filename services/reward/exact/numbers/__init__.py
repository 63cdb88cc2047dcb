"""Numbers and polynomials: read, computed and compared exactly."""
