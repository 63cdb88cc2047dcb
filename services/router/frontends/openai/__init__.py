"""The router's OpenAI-compatible HTTP frontend."""
