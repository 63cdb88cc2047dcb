"""Keeps what the policy wrote: episodes of the run, with every token, for `penstock view`."""
