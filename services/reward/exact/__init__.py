"""Finds the answer in a response, normalises its spelling, reads its value, and compares it. Pure, without sympy."""
