"""Checks of a recipe that need its model or data, before anything starts."""
