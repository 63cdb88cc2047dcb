"""The router's OpenAI-compatible face over HTTP."""
