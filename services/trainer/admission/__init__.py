"""Decides which groups may be played and which are trained next: pure rules, without I/O."""
