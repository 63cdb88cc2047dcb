"""What a person needs to train an agent of their own: what a runner is given, and what it returns.

docs/rollouts/agents.md is the guide.
"""

from penstock.agents.runner import AgentResult, AgentSession, Runner

__all__ = ["AgentResult", "AgentSession", "Runner"]
