"""Tests of how ranks start, and how they notice that one is gone."""
