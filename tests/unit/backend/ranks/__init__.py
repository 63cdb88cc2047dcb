"""Tests of steps that many ranks compute together."""
