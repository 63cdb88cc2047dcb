"""Groups: all samples or none, and verdicts that never lie."""

import asyncio
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, cast, get_args

import msgspec
import pytest

from penstock.errors import InvalidRequestError, PenstockError, PoisonError, UnavailableError
from penstock.records import GroupId, ImagePart, Message, Prompt, Sampling, TextPart, text_for_verifiers
from penstock.telemetry import metrics
from penstock.v1 import common_pb2, generate_pb2, reward_pb2
from penstock.verdict_status import Status
from services.rollout.worker.answer_verifier import AnswerVerifier
from services.rollout.worker.closings import Closings
from services.rollout.worker.episodes.episode import Ending, Episode
from services.rollout.worker.episodes.episode_player import EpisodePlayer
from services.rollout.worker.episodes.trajectory import STOP, Trajectory
from services.rollout.worker.group_images import GroupImages
from services.rollout.worker.group_rollout import GroupRollout, summarize
from services.rollout.worker.shared_rendering import SharedRendering
from tests.support.image_shelf import ImageShelf
from tests.support.waiting import until

PROMPT = Prompt(
    id=GroupId(run_id="run", index=0, attempt=0, trainer_epoch="a"),
    admitted_version=0,
    num_samples=3,
    sampling=Sampling(temperature=1.0),
    messages=(Message(role="user", parts=(TextPart(text="?"),)),),
    images=(),
    golds=("3", "3.0"),
    profile="geo3k",
    environment="single_turn",
)


@dataclasses.dataclass
class ScriptedEpisodes:
    """Plays by `script`: sample number to error, or "wait"; otherwise the sample's text is its number. "broken": its
    environment failed; "rewarded": it gave a reward of 0.5; "cut" and "ended": a token limit, or one
    of turns, ended the sample."""

    script: dict[int, BaseException | str] = dataclasses.field(default_factory=dict)
    num_waiting: int = 0
    num_cancelled: int = 0

    async def play(
        self, prompt: Prompt, sample: int, images: GroupImages, _shared: SharedRendering, _closings: Closings
    ) -> Episode:
        scripted = self.script.get(sample)
        match scripted:
            case "wait":
                self.num_waiting += 1
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    self.num_cancelled += 1
                    raise
            case BaseException() as error:
                raise error
        trajectory = Trajectory(min_version=0, forbidden_ids=())
        trajectory.add_observation([1])
        trajectory.add_turn(
            generate_pb2.GenerateResponse(
                output_ids=[2],
                logprobs=[-1.0],
                version_spans=[common_pb2.VersionSpan(num_tokens=1, policy_version=sample)],
                finish_reason=STOP,
            )
        )
        if scripted == "rewarded":
            trajectory.add_step(0.5, {})
        endings: dict[object, Ending] = {"broken": "error", "cut": "length", "ended": "environment"}
        ending = endings.get(scripted, "stop")
        error = "the tool crashed" if scripted == "broken" else ""
        said = f"said {sample}"
        return Episode(trajectory=trajectory, text=said, answer=said, finish_reason=ending, error=error)


@dataclasses.dataclass
class ScriptedVerifier:
    """Gives the verdict that `verdict` makes of each item."""

    verdict: Callable[[reward_pb2.VerifyItem], reward_pb2.Verdict]
    items: list[reward_pb2.VerifyItem] = dataclasses.field(default_factory=list)

    async def verify_batch(
        self, items: Sequence[reward_pb2.VerifyItem], *, timeout_s: float, retry_until: float | None = None
    ) -> list[reward_pb2.Verdict]:
        self.items += items
        return [self.verdict(item) for item in items]


def with_status(status: Any, score: float = 0.0) -> ScriptedVerifier:
    """A verifier that always gives `status`."""
    return ScriptedVerifier(lambda item: reward_pb2.Verdict(item_id=item.item_id, score=score, status=status))


def make_player(verifier: ScriptedVerifier, episodes: ScriptedEpisodes | None = None) -> GroupRollout:
    """A player of scripted parts."""
    played = cast(EpisodePlayer, episodes or ScriptedEpisodes())
    return GroupRollout(
        episodes=played, images=ImageShelf(), answer_verifier=AnswerVerifier(verifier), worker_id="worker-a"
    )


async def test_a_prompt_whose_image_is_gone_is_reported_as_lost() -> None:
    """Its group holds no samples and says why: the trainer, which has the image, admits it again."""
    prompt = msgspec.structs.replace(
        PROMPT, images=("0a" * 32,), messages=(Message(role="user", parts=(ImagePart(index=0),)),)
    )
    group = await make_player(with_status(reward_pb2.VERDICT_STATUS_OK)).play(prompt, Closings(), num_deliveries=2)
    assert (group.is_lost, group.samples, group.num_deliveries) == (True, (), 2)
    assert group.error == f"image {'0a' * 32} is not stored"


async def test_a_group_says_at_which_temperature_it_was_sampled() -> None:
    """A trainer that resumes with another one has its prompt played again."""
    prompt = msgspec.structs.replace(PROMPT, sampling=Sampling(temperature=0.5))
    group = await make_player(with_status(reward_pb2.VERDICT_STATUS_OK)).play(prompt, Closings())
    assert group.temperature == 0.5


async def test_every_sample_gets_its_own_verdict() -> None:
    """Samples and verdicts stay in the order of their numbers."""
    verifier = ScriptedVerifier(
        lambda item: reward_pb2.Verdict(
            item_id=item.item_id,
            score=float(item.response == "said 1"),
            status=reward_pb2.VERDICT_STATUS_OK,
            extracted=item.response,
            method=reward_pb2.VERDICT_METHOD_SYMBOLIC,
        )
    )
    group = await make_player(verifier).play(PROMPT, Closings())
    assert [sample.text for sample in group.samples] == ["said 0", "said 1", "said 2"]
    assert [sample.reward for sample in group.samples] == [0.0, 1.0, 0.0]
    assert {sample.verdict.method for sample in group.samples if sample.verdict} == {"SYMBOLIC"}
    assert (group.worker_id, group.error, group.oldest_version) == ("worker-a", "", 0)
    assert [item.item_id for item in verifier.items] == ["run/0/0/a/0", "run/0/0/a/1", "run/0/0/a/2"]
    assert {(tuple(item.golds), item.profile) for item in verifier.items} == {(("3", "3.0"), "geo3k")}


def test_a_prompt_is_the_text_of_its_messages() -> None:
    """For verifiers that look at the question; of a very long one they get the end."""
    messages = (
        Message(role="system", parts=(TextPart(text="Be brief."),)),
        Message(role="user", parts=(ImagePart(index=0), TextPart(text="Find x."))),
    )
    assert text_for_verifiers(messages) == "Be brief.\n\n<image>Find x."
    long = (*messages, Message(role="user", parts=(TextPart(text="a" * 70_000 + "z"),)))
    assert text_for_verifiers(long) == "a" * 65_535 + "z"


async def test_verifiers_hear_what_was_asked() -> None:
    """A judge, or a verifier of a person's own, reads the question."""
    verifier = with_status(reward_pb2.VERDICT_STATUS_OK)
    await make_player(verifier).play(PROMPT, Closings())
    assert [item.prompt for item in verifier.items] == ["?"] * 3


@pytest.mark.parametrize("status", ["NO_ANSWER", "UNPARSEABLE", "TOO_LARGE"])
async def test_a_judged_response_keeps_its_status(status: str) -> None:
    """These are scores of the policy."""
    group = await make_player(with_status(reward_pb2.VerdictStatus.Value(f"VERDICT_STATUS_{status}"))).play(
        PROMPT, Closings()
    )
    assert [(sample.reward, sample.verdict and sample.verdict.status) for sample in group.samples] == [
        (0.0, status)
    ] * 3
    assert summarize(group.samples)["num_unjudged"] == 0


@pytest.mark.parametrize("status", ["TIMEOUT", "OUT_OF_MEMORY", "FAILED"])
async def test_an_unjudged_response_scores_zero_under_its_own_status_and_is_counted(status: str) -> None:
    """Whatever score such a verdict carries, it is no right answer; and it is no silent zero either."""
    verifier = with_status(reward_pb2.VerdictStatus.Value(f"VERDICT_STATUS_{status}"), score=1.0)
    group = await make_player(verifier).play(PROMPT, Closings())
    assert [(sample.reward, sample.verdict and sample.verdict.status) for sample in group.samples] == [
        (None, status)
    ] * 3
    summary = summarize(group.samples)
    assert summary["num_unjudged"] == 3
    assert summary["statuses"] == {status: 3}


async def test_a_gold_answer_that_cannot_be_read_fails_the_group_for_good() -> None:
    """It is a fault of the data, so no other try is made; the message names row, gold and profile."""
    with pytest.raises(InvalidRequestError, match=r"gold answers \['3', '3.0'\] of group run/0 .* 'geo3k'"):
        await make_player(with_status(reward_pb2.VERDICT_STATUS_GOLD_INVALID)).play(PROMPT, Closings())


@pytest.mark.parametrize(
    ("endings", "environment", "is_refused"),
    [
        ({0: "rewarded", 1: "cut", 2: "rewarded"}, "puzzle", False),
        ({0: "cut", 1: "cut", 2: "cut"}, "puzzle", False),
        ({0: "rewarded", 1: "ended", 2: "cut"}, "puzzle", False),
        ({0: "rewarded", 1: "whole", 2: "cut"}, "puzzle", True),
        ({0: "cut", 1: "cut", 2: "cut"}, "single_turn", True),
    ],
)
async def test_golds_are_not_needed_where_the_environment_gives_rewards(
    endings: dict[int, Any], environment: str, is_refused: bool
) -> None:
    """A sample that was cut short before its reward costs itself, not its group."""
    prompt = msgspec.structs.replace(PROMPT, environment=environment)
    player = make_player(with_status(reward_pb2.VERDICT_STATUS_GOLD_INVALID), ScriptedEpisodes(endings))
    if is_refused:
        with pytest.raises(InvalidRequestError, match="gold answers"):
            await player.play(prompt, Closings())
        return
    samples = (await player.play(prompt, Closings())).samples
    assert [sample.reward for sample in samples] == [0.5 if endings[each] == "rewarded" else None for each in range(3)]


async def test_a_verdict_without_status_fails_the_group() -> None:
    """An unset field is never taken for a zero."""
    with pytest.raises(PenstockError, match="status UNSPECIFIED"):
        await make_player(with_status(reward_pb2.VERDICT_STATUS_UNSPECIFIED)).play(PROMPT, Closings())


async def test_endings_and_statuses_that_are_counted_are_known_ones() -> None:
    """Each label is a time series. A status that a newer reward service may give fails the group instead."""
    endings = ScriptedEpisodes({0: "broken", 1: "cut", 2: "ended"})
    await make_player(with_status(reward_pb2.VERDICT_STATUS_OK), endings).play(PROMPT, Closings())
    with pytest.raises(PenstockError, match="status 77, which is unknown"):
        await make_player(with_status(77)).play(PROMPT, Closings())
    page = (await metrics.page()).decode()
    ends = set(re.findall(r'penstock_worker_samples_total{end="(.*)"}', page))
    statuses = set(re.findall(r'penstock_worker_verdicts_total{status="(.*)"}', page))
    assert {"error", "length", "environment"} <= ends <= set(get_args(Ending))
    assert {"OK", "FAILED"} <= statuses <= {*Status}


async def test_a_sample_that_its_environment_failed_is_unjudged_and_the_others_count() -> None:
    """The verifier does not see it; its status is one definition's with those that ran into a verifier's limits."""
    verifier = with_status(reward_pb2.VERDICT_STATUS_OK, score=1.0)
    group = await make_player(verifier, ScriptedEpisodes({1: "broken"})).play(PROMPT, Closings())
    assert [sample.reward for sample in group.samples] == [1.0, None, 1.0]
    assert [sample.verdict is not None and sample.verdict.is_judged for sample in group.samples] == [True, False, True]
    assert [item.item_id for item in verifier.items] == ["run/0/0/a/0", "run/0/0/a/2"]
    summary = summarize(group.samples)
    assert (summary["num_unjudged"], summary["endings"]) == (1, {"error": 1, "stop": 2})


async def test_a_group_that_breaks_every_replica_fails_for_good() -> None:
    """Of several failures at once, that one decides: another delivery would break more replicas."""
    episodes = ScriptedEpisodes({0: UnavailableError("no replica"), 2: PoisonError("3 replicas failed")})
    with pytest.raises(PoisonError, match="3 replicas failed"):
        await make_player(with_status(reward_pb2.VERDICT_STATUS_OK), episodes).play(PROMPT, Closings())


async def test_one_failed_sample_cancels_the_others() -> None:
    """A group is whole or not at all, so nothing more is spent on it; nothing is judged."""
    episodes = ScriptedEpisodes({0: "wait", 1: UnavailableError("no replica"), 2: "wait"})
    verifier = with_status(reward_pb2.VERDICT_STATUS_OK)
    with pytest.raises(UnavailableError, match="no replica"):
        await make_player(verifier, episodes).play(PROMPT, Closings())
    assert episodes.num_cancelled == 2
    assert verifier.items == []


class Panic(BaseException):
    """As pyo3 raises one for a panic of Rust code."""


@pytest.mark.parametrize("other", [UnavailableError("no replica"), Panic("index out of bounds")])
async def test_the_error_that_no_other_try_can_mend_decides(other: BaseException) -> None:
    """Of several failures at once, the hopeless one says what becomes of the prompt."""
    episodes = ScriptedEpisodes({0: other, 2: InvalidRequestError("too long")})
    with pytest.raises(InvalidRequestError, match="too long"):
        await make_player(with_status(reward_pb2.VERDICT_STATUS_OK), episodes).play(PROMPT, Closings())


async def test_cancelling_a_group_cancels_its_samples() -> None:
    """A worker that stops leaves nothing running."""
    episodes = ScriptedEpisodes({0: "wait", 1: "wait", 2: "wait"})
    task = asyncio.create_task(
        make_player(with_status(reward_pb2.VERDICT_STATUS_OK), episodes).play(PROMPT, Closings())
    )
    await until(lambda: episodes.num_waiting == 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert episodes.num_cancelled == 3
