"""Processes that end with the one that started them, and leave no process of their own behind."""
