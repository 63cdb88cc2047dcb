"""Compares this host with others that take part in a run: clocks, versions, names, shared paths, ports."""
