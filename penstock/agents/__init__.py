"""Interface for training your own agent: the inputs and results of a runner.

docs/rollouts/agents.md is the guide.
"""

from penstock.agents.runner import AgentResult, AgentSession, Runner

__all__ = ["AgentResult", "AgentSession", "Runner"]
