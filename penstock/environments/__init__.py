"""Interface for writing an environment: the protocol, and the parts of tool-using environments.

Environments that come with Penstock are in `services.rollout.worker.environments`. The guide is
docs/rollouts/environments.md.
"""

from penstock.environments.protocol import (
    BlockingEnvironment,
    BlockingGrade,
    BlockingTask,
    Environment,
    EnvironmentFactory,
    Grade,
    Observation,
    StepResult,
    Task,
)
from penstock.environments.tool_environment import ToolEnvironment
from penstock.environments.tools import Tool, ToolError, ToolResult
from penstock.model.chat.assistant_turn import AssistantTurn

__all__ = [
    "AssistantTurn",
    "BlockingEnvironment",
    "BlockingGrade",
    "BlockingTask",
    "Environment",
    "EnvironmentFactory",
    "Grade",
    "Observation",
    "StepResult",
    "Task",
    "Tool",
    "ToolEnvironment",
    "ToolError",
    "ToolResult",
]
