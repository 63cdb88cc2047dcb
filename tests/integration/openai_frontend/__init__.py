"""The router's OpenAI-compatible frontend, as OpenAI's own client sees it."""
