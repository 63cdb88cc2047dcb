"""The checks of `penstock doctor`: each is a function from a machine's facts to findings."""
