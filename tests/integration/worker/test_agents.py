"""Agents play whole groups: through the router's sessions, token for token, whatever their runners do."""

import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from penstock.agents import AgentSession
from penstock.bus.connection import Bus
from penstock.bus.image_store import hash_of
from penstock.bus.sessions import Sessions
from penstock.model.chat.chat_template import Renderer
from penstock.records import Limits, Sampling, SessionId, VersionSpan
from penstock.telemetry import spans
from penstock.testing.simulated_engine import SimulatedEngine
from services.rollout.worker.agents import agent_player
from tests.support.worker import agent_runners
from tests.support.worker.agent_harness import LONG, PROGRAM, RUNNERS, TEXT, Speaker, guess
from tests.support.worker.prompts import PICTURE, make_prompt, publish, until_done, working


@pytest.fixture
async def engine(bus: Bus, renderer: Renderer) -> AsyncIterator[SimulatedEngine]:
    """An engine that guesses by the hints that it sees, and else gives the right answer."""
    answers = [("Lower.", guess(3)), ("Higher.", guess(9)), ("guess", guess(1)), ("", "The answer is \\boxed{3}")]
    async with SimulatedEngine(bus, answer=Speaker(renderer, answers), policy_version=4).running() as engine:
        yield engine


async def test_a_group_played_by_the_agent_of_the_guide(
    bus: Bus, engine: SimulatedEngine, make_harness: Callable[..., Any], run_name: str
) -> None:
    """Each sample is one sequence of exactly the engine's ids, drawn as the prompt says and rewarded by the agent."""
    recipe = await make_harness({"guesser": "examples.agent.guesser:play"})
    sampling = Sampling(temperature=0.75, top_p=0.5, top_k=9, max_new_tokens=500)
    await publish(bus, make_prompt(run_name, environment="guesser", sampling=sampling, **TEXT))
    async with working(recipe):
        [group] = await until_done(bus, 1)
    assert (group.error, len(group.samples)) == ("", 2)
    assert isinstance(engine.answer, Speaker)
    said = [engine.answer.ids(guess(number)) for number in (1, 9, 3)]
    requests = [list(request.input_ids) for request in engine.requests]
    for sample in group.samples:
        [sequence] = sample.sequences
        ids = sequence.token_ids.tolist()
        assert requests.count(ids[: -len(said[2])]) == 2
        assert sequence.token_ids[sequence.loss_mask].tolist() == [*said[0], *said[1], *said[2]]
        logprobs = [-(index + 1) / 64 for each in said for index in range(len(each))]
        assert sequence.logprobs[sequence.loss_mask].tolist() == logprobs
        assert sequence.version_spans == (VersionSpan(num_tokens=len(logprobs), policy_version=4),)
        assert sample.reward == pytest.approx(0.8)
        assert (sample.finish_reason, sample.verdict, len(sample.turns)) == ("stop", None, 3)
        assert sample.text.count("guess") == 3
    drawn = {(each.sampling.temperature, each.sampling.top_p, each.sampling.top_k) for each in engine.requests}
    assert drawn == {(0.75, 0.5, 9)}
    assert {each.min_policy_version for each in engine.requests} == {4}
    assert {each.group_id for each in engine.requests} == {group.id.message}
    assert len({each.session_id for each in engine.requests}) == 2
    assert await Sessions(bus).read(SessionId(sample_key=engine.requests[0].session_id, nonce="0" * 32)) == []


@pytest.fixture
def buffer() -> Iterator[spans.SpanBuffer]:
    """The spans of this process, which is worker and router."""
    yield spans.open_buffer("both")
    spans.close_buffer()


async def test_sessions_and_calls_are_recorded(
    bus: Bus, engine: SimulatedEngine, make_harness: Callable[..., Any], run_name: str, buffer: spans.SpanBuffer
) -> None:
    """A span for each session, by the worker, and in it one for each call, by the router."""
    recipe = await make_harness({"guesser": "examples.agent.guesser:play"})
    await publish(bus, make_prompt(run_name, environment="guesser", sampling=LONG, **TEXT))
    async with working(recipe):
        [group] = await until_done(bus, 1)
    found = json.loads(buffer.take_batch(1000)[0])["spans"]
    sessions = [span for span in found if span[0] == "session"]
    assert sorted((about["group"], about["sample"], about["agent"], about["num_calls"]) for *_, about in sessions) == [
        (group.id.message, sample, "guesser", 3) for sample in (0, 1)
    ]
    for _, start, seconds, about in sessions:
        calls = [span for span in found if span[0] == "session.call" and span[3]["sample"] == about["sample"]]
        assert len(calls) == 3
        assert all(start <= begin and begin + length <= start + seconds for _, begin, length, _ in calls)
        assert {call["group"] for *_, call in calls} == {group.id.message}
        assert sum(call["num_tokens"] for *_, call in calls) == group.samples[about["sample"]].num_own_tokens


async def test_a_reward_can_be_left_to_the_reward_service(
    bus: Bus, engine: SimulatedEngine, make_harness: Callable[..., Any], run_name: str
) -> None:
    """It judges the last answer; the row's picture is shown by its hash, as the trainer stored it."""
    recipe = await make_harness({"shown": f"{RUNNERS}:leave_it_to_the_reward_service", "block": f"{RUNNERS}:block"})
    await publish(bus, make_prompt(run_name, environment="shown", sampling=LONG))
    await publish(bus, make_prompt(run_name, 1, environment="block", sampling=LONG))
    async with working(recipe):
        groups = await until_done(bus, 2)
    judged, given = sorted(groups, key=lambda group: group.id.index)
    for sample in judged.samples:
        assert sample.verdict is not None
        assert (sample.reward, sample.verdict.status, sample.verdict.extracted) == (1.0, "OK", "3")
        assert sample.sequences[0].images == (hash_of(PICTURE),)
    for sample in given.samples:
        assert (sample.reward, sample.verdict, list(sample.metrics)) == (0.25, None, ["seed"])
    assert {image.stored.sha256 for each in engine.requests for image in each.images} == {hash_of(PICTURE)}
    assert {image.stored.scope for each in engine.requests for image in each.images} == {
        group.id.scope for group in groups
    }


async def test_branches_are_sequences_of_one_sample(
    bus: Bus, engine: SimulatedEngine, make_harness: Callable[..., Any], run_name: str
) -> None:
    """Three calls that do not extend one another: three sequences, one reward, each answer trained once."""
    recipe = await make_harness({"branch": f"{RUNNERS}:branch"})
    await publish(bus, make_prompt(run_name, environment="branch", sampling=LONG, **TEXT))
    async with working(recipe):
        [group] = await until_done(bus, 1)
    for sample in group.samples:
        assert (len(sample.sequences), sample.reward, len(sample.turns)) == (3, 1.0, 3)
        assert sample.num_own_tokens == sum(turn.num_output_tokens for turn in sample.turns)


async def test_what_goes_wrong_in_a_runner_costs_its_sample_alone(
    bus: Bus, engine: SimulatedEngine, make_harness: Callable[..., Any], run_name: str, tmp_path: Path
) -> None:
    """Each ends by kind with what was recorded, no reward, and a reason; the others of its worker are played."""
    twice = tmp_path / "twice.py"
    twice.write_text(PROGRAM + "print(json.dumps({'reward': 1.0}))\nprint(json.dumps({'reward': 0.0}))\n")
    dying = tmp_path / "dying.py"
    dying.write_text(PROGRAM + "sys.exit('out of memory')\n")
    reasons = {
        "raises": (f"{RUNNERS}:raise_an_error", "KeyError: 'no such column'"),
        "nan": (f"{RUNNERS}:return_nan", "reward = nan must be a finite number"),
        "text": (f"{RUNNERS}:return_text", "a runner returns a reward, None or an AgentResult, not str"),
        "twice": ({"command": [sys.executable, str(twice)]}, "it answered more than once; write one JSON object"),
        "dying": ({"command": [sys.executable, str(dying)]}, "the program ended with exit code 1: out of memory"),
    }
    recipe = await make_harness({name: agent for name, (agent, _) in reasons.items()})
    for index, name in enumerate(reasons):
        await publish(bus, make_prompt(run_name, index, environment=name, num_samples=1, sampling=LONG, **TEXT))
    async with working(recipe):
        groups = await until_done(bus, len(reasons))
    for group in groups:
        name, (_, reason) = list(reasons.items())[group.id.index]
        [sample] = group.samples
        assert sample.error.startswith(f"agent '{name}': ")
        assert reason in sample.error
        assert (sample.finish_reason, sample.reward) == ("error", None)
        assert sample.num_own_tokens == len(engine.answer.ids("The answer is \\boxed{3}"))  # type: ignore[attr-defined]


async def test_a_runner_that_cuts_a_verdict_short_has_no_reward(
    bus: Bus, engine: SimulatedEngine, make_harness: Callable[..., Any], run_name: str
) -> None:
    """Its 0 may stand for a reward service that is away."""
    recipe = await make_harness({"impatient": f"{RUNNERS}:cut_a_verdict_short"})
    await publish(bus, make_prompt(run_name, environment="impatient", num_samples=1, sampling=LONG, **TEXT))
    async with working(recipe):
        [group] = await until_done(bus, 1)
    [sample] = group.samples
    assert (sample.reward, sample.finish_reason) == (None, "error")
    assert "was not judged: the wait for the verdict was cut short" in sample.error


@pytest.mark.slow
async def test_a_runner_that_never_ends_is_ended(
    bus: Bus, engine: SimulatedEngine, make_harness: Callable[..., Any], run_name: str, tmp_path: Path
) -> None:
    """With what it recorded, which the reward service judges; a row without golds is left without a reward."""
    hanging, pid_file = tmp_path / "hanging.py", tmp_path / "pid"
    hanging.write_text(
        f"{PROGRAM}import os, pathlib, time\npathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))\n"
        "time.sleep(3600)\n"
    )
    agents = {
        "coroutine": f"{RUNNERS}:hang",
        "thread": f"{RUNNERS}:hang_in_a_thread",
        "program": {"command": [sys.executable, str(hanging)]},
    }
    recipe = await make_harness(agents)
    limits = Limits(episode_timeout_s=10.0)
    for index, name in enumerate(agents):
        prompt = make_prompt(
            run_name, index, environment=name, num_samples=1, sampling=LONG, limits=limits, **TEXT,
            golds=() if name == "coroutine" else ("3",),
        )  # fmt: skip
        await publish(bus, prompt)
    async with working(recipe):
        groups = await until_done(bus, len(agents))
    agent_runners.released.set()
    for group in groups:
        [sample] = group.samples
        assert sample.finish_reason == "deadline"
        assert "its runner was ended after 10 s, before it gave a reward; see worker.episode_" in sample.ended_by
        if group.id.index == 0:
            assert sample.reward is None
            assert "its runner was ended after 10 s, before it gave a reward" in sample.error
        else:
            assert (sample.reward, sample.error) == (1.0, "")
    assert not Path(f"/proc/{pid_file.read_text()}").exists()


async def test_a_runner_that_asks_nothing_fails_its_group_with_the_reason(
    bus: Bus,
    engine: SimulatedEngine,
    make_harness: Callable[..., Any],
    run_name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After three attempts in each delivery: there is no sample without tokens."""
    monkeypatch.setattr(agent_player, "_PAUSE_S", 0.0)
    recipe = await make_harness({"idle": f"{RUNNERS}:ask_nothing", "gone": {"command": ["/nowhere/agent"]}})
    await publish(bus, make_prompt(run_name, environment="idle", num_samples=1, **TEXT))
    await publish(bus, make_prompt(run_name, 1, environment="gone", num_samples=1, **TEXT))
    async with working(recipe, max_deliveries=2):
        idle, gone = sorted(await until_done(bus, 2), key=lambda group: group.id.index)
    assert "agent 'idle' got no answer of the policy in 3 attempts at sample 0: its runner returned" in idle.error
    assert "/nowhere/agent does not start: No such file or directory; correct its command" in gone.error


@pytest.mark.slow
async def test_a_session_is_over_when_its_sample_is(
    bus: Bus, engine: SimulatedEngine, make_harness: Callable[..., Any], run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever kept its URL hears 410 from then on, and nothing of it is trained."""
    urls: list[str] = []

    async def leak(session: AgentSession) -> float:
        urls.append(session.base_url)
        await agent_runners.ask(session)
        return 1.0

    monkeypatch.setattr(agent_runners, "leave_it_to_the_reward_service", leak)
    recipe = await make_harness({"leak": f"{RUNNERS}:leave_it_to_the_reward_service"})
    await publish(bus, make_prompt(run_name, environment="leak", num_samples=1, sampling=LONG, **TEXT))
    async with working(recipe):
        await until_done(bus, 1)
    num_calls = engine.num_calls
    async with openai.AsyncOpenAI(base_url=urls[0], api_key="none") as client:
        with pytest.raises(openai.APIStatusError, match="this session is closed") as caught:
            await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "more"}])
    assert (caught.value.status_code, caught.value.code) == (410, "session_closed")
    assert engine.num_calls == num_calls


async def test_a_worker_whose_sample_another_one_plays_gives_it_up(
    bus: Bus, engine: SimulatedEngine, make_harness: Callable[..., Any], run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was frozen, say: it neither publishes what it has nor takes the sample back."""
    superseding: list[str] = []

    async def lose(session: AgentSession) -> float:
        await agent_runners.ask(session)
        if not superseding:
            mine = SessionId.parse(session.base_url.split("/")[-2])
            assert mine is not None
            found = await Sessions(bus).find(mine)
            assert found is not None
            other = SessionId(sample_key=mine.sample_key, nonce="0" * 32)
            await Sessions(bus).open(other, msgspec.structs.replace(found.state, nonce=other.nonce))
            superseding.append(session.base_url)
        return 1.0

    monkeypatch.setattr(agent_runners, "leave_it_to_the_reward_service", lose)
    recipe = await make_harness({"lose": f"{RUNNERS}:leave_it_to_the_reward_service"})
    await publish(bus, make_prompt(run_name, environment="lose", num_samples=1, sampling=LONG, **TEXT))
    async with working(recipe):
        [group] = await until_done(bus, 1)
    assert group.num_deliveries > 1
    assert (len(superseding), engine.num_calls) == (1, 2)
