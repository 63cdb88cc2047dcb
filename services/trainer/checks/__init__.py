"""Checks of settings that need several sections, or the model; each is pure, and made before anything is loaded."""
