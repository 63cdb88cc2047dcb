"""Agent episodes: a user's program plays the sample, and talks to the policy over an OpenAI-compatible URL."""
