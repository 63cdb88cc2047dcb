"""Chooses the player of a prompt's samples: its environment, turn by turn, or an agent on its own."""

from typing import Protocol

from penstock.records import Prompt, Sample, Verdict
from penstock.telemetry import spans
from services.rollout.worker.agents.agent_player import AgentPlayer
from services.rollout.worker.closings import Closings
from services.rollout.worker.episodes.episode_player import EpisodePlayer
from services.rollout.worker.group_images import GroupImages
from services.rollout.worker.shared_rendering import SharedRendering


class Played(Protocol):
    """A sample that was played and has no verdict yet."""

    @property
    def answer(self) -> str:
        """The text for the reward service to judge."""
        ...

    @property
    def error(self) -> str:
        """Why it cannot be judged; empty if it can."""
        ...

    @property
    def finish_reason(self) -> str:
        """How it ended; see `penstock.records.Sample`."""
        ...

    @property
    def needs_verdict(self) -> bool:
        """Whether the reward service decides its reward."""
        ...

    def to_sample(self, verdict: Verdict | None) -> Sample:
        """Return the finished sample; `verdict` is the reward service's, if it was asked."""
        ...


class Player(Protocol):
    """Plays samples."""

    async def play(
        self, prompt: Prompt, number: int, images: GroupImages, shared: SharedRendering, closings: Closings
    ) -> Played:
        """Play sample `number` of `prompt`; `images`, `shared` and `closings` are the group's."""
        ...


class Players:
    """Gives each prompt to the player that it names."""

    def __init__(self, episodes: EpisodePlayer, agents: AgentPlayer) -> None:
        """Have `agents` play prompts whose environment is the name of an agent, and `episodes` all others."""
        self._episodes = episodes
        self._agents = agents

    async def play(
        self, prompt: Prompt, number: int, images: GroupImages, shared: SharedRendering, closings: Closings
    ) -> Played:
        """See `Player`."""
        with spans.recorded("episode", group=prompt.id.message, sample=number) as about:
            played: Played
            if self._agents.plays(prompt.environment):
                played = await self._agents.play(prompt, number, images, closings)
            else:
                played = await self._episodes.play(prompt, number, images, shared, closings)
            about["finish_reason"] = played.finish_reason
            if played.error:
                about["error"] = played.error
        return played
