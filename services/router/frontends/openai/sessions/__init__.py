"""Sessions of agents: recorded chats whose prompts continue the policy's earlier answers, id for id."""
