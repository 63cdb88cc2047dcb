"""Starts SGLang in this process, and reads what it returns."""
