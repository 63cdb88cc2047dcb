"""Formats of weights in transit, on which trainer and engine must agree byte for byte."""
