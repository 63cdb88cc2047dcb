"""Sessions of agents: chats whose prompts continue the policy's earlier answers id for id, and that are all
recorded.
"""
