"""The router's OpenAI-compatible face, as OpenAI's own client sees it."""
