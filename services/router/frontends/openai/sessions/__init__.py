"""Sessions of agents: chats whose prompts continue what the policy said before, id for id, and that are all kept."""
