"""Judges answers in environments played by hand, with a running reward service or a private one started when needed."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Self

from penstock.clients import RewardClient
from penstock.environments import Grade
from penstock.errors import ConfigError
from penstock.records import GroupId, Prompt, Sampling, Verdict
from penstock.runtime.imports import import_with_extra
from penstock.runtime.security import Security
from penstock.v1 import reward_pb2
from services.cli.score.reward_caller import RewardCaller, Service
from services.reward.config import RewardConfig
from services.rollout.worker.answer_verifier import AnswerVerifier

_DEADLINE_S = 10.0


class Grading:
    """Makes the graders of tasks; use it as a context manager."""

    def __init__(self, service: Service) -> None:
        """Use `service`, which is opened when the first answer is graded."""
        self._service = service
        self._stack = contextlib.ExitStack()
        self._caller: RewardCaller | None = None
        self._profiles: set[str] = set()

    def __enter__(self) -> Self:
        """Return the grading; nothing is opened yet."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the service, if it was opened."""
        self._stack.close()

    def grade(self, golds: Sequence[str], profile: str) -> Grade:
        """Return a grader of the answers to one task.

        It raises ConfigError for a profile that the service lacks, SetupError if none answers, InvalidRequestError for
        gold answers that cannot be read.
        """
        prompt = Prompt(
            id=GroupId(run_id="by-hand", index=0, attempt=0, trainer_epoch="0"),
            admitted_version=0,
            num_samples=1,
            sampling=Sampling(temperature=1.0, max_new_tokens=1),
            messages=(),
            images=(),
            golds=tuple(golds),
            profile=profile,
            environment="",
        )

        async def grade(text: str) -> Verdict:
            if self._caller is None:
                await asyncio.to_thread(self._open)
            if profile not in self._profiles:
                known = ", ".join(sorted(self._profiles))
                raise ConfigError(f"profile {profile!r} is unknown to the reward service; known: {known}")
            [verdict] = await AnswerVerifier(self).verify(prompt, [("by-hand", text)])
            return verdict

        return grade

    async def verify_batch(
        self, items: Sequence[reward_pb2.VerifyItem], *, timeout_s: float, retry_until: float | None = None
    ) -> list[reward_pb2.Verdict]:
        """Judge `items` for the worker's `AnswerVerifier`; the caller has its own deadlines."""
        assert self._caller is not None, "`grade` opens it first"
        return await asyncio.wrap_future(self._caller.verify(items))

    def _open(self) -> None:
        caller = self._stack.enter_context(RewardCaller(self._service))
        self._profiles = caller.known_profiles()
        self._caller = caller


@contextlib.asynccontextmanager
async def open_service(address: str, config: RewardConfig, security: Security) -> AsyncIterator[RewardClient]:
    """Yield a client of the service at `address`, or else of a private one. That has a single worker, because turns
    come one at a time, and is patient, because a person prefers to wait for a verdict."""
    from services.cli.score.run import private_service, running_at

    if address:
        async with running_at(address, security) as client:
            yield client
        return
    import_with_extra("services.reward.server", "penstock env", extra="reward")
    patient = config.model_copy(update={"workers": 1, "deadline_s": max(config.deadline_s, _DEADLINE_S)})
    async with private_service(patient, security) as client:
        yield client
