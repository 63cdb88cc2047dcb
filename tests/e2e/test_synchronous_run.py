"""max_staleness = 0 over every kind of picture: the asynchronous system is then plain GRPO, number for number."""

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from penstock.bus.connection import connect
from penstock.clients import RouterClient, TrainerClient
from penstock.config import SecurityConfig, load
from penstock.errors import AccessError, DeadlineError, UnavailableError
from penstock.records import Sample, Turn
from penstock.runtime.ports import free_ports
from penstock.runtime.security import Security
from penstock.testing.tolerance import MAX_DLOGP
from penstock.testing.train_process import RECIPE, TrainProcess, started
from services.recipe import Recipe
from services.trainer.backend.base import take_step
from services.trainer.backend.in_process import InProcessBackend
from services.trainer.batching.sequences import open_reader
from services.trainer.data.geometry import GeometryDataset
from services.trainer.replay.recording import read_recording
from services.view.trace_events import write_trace_events
from services.view.trace_reader import Span, TraceReader
from tests.support.certificates import make_certificates, security_of
from tests.support.perfetto import find_faults
from tests.support.strangers import TOKEN, WRONG, assert_rpc_is_closed
from tests.support.waiting import HANG_S, until
from tests.support.worker import second_picture

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

T = TypeVar("T")

NUM_STEPS, GROUPS_PER_STEP = 4, 4
AGENT = "retry"
"""Plays half of the rows."""
SECOND_PICTURE = "second_picture"
"""An environment that plays a quarter of them; the others have one turn."""

_CLOCK_S = 0.1
"""Seconds by which two processes' times of one moment may differ: below 50 ms nothing is corrected."""
NATS_TOKEN = "5b0e7c1d9a3f48628d1f0c2e4b6a7988"


@pytest.fixture(scope="module")
async def run(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TrainProcess]:
    """A finished run of four synchronous steps, with tokens and TLS; strangers have tried to enter."""
    tmp_path = tmp_path_factory.mktemp("synchronous")
    certificates = make_certificates(tmp_path)
    data = tmp_path / "rows.parquet"
    write_rows(data)
    overrides = {
        "run.dir": tmp_path / "runs",
        "data.path": data,
        "data.environment_column": "environment",
        f"worker.agents.{AGENT}.function": "examples.agent.retry_agent:play",
        f"worker.environments.{SECOND_PICTURE}.class": f"{second_picture.__name__}:SecondPicture",
        "bus.lease_ttl_s": 30.0,
        "router.http_port": free_ports(1)[0],
        "rollout.replicas": 1,
        "trainer.max_staleness": 0,
        "trainer.num_steps": NUM_STEPS,
        "trainer.groups_per_step": GROUPS_PER_STEP,
        "trainer.samples_per_group": 4,
        "trainer.micro_batch_tokens": 64,  # so that a group is enough for a chunk
        "trainer.record_groups": "true",
        "trainer.checkpoint_every": 2,
        **{f"security.{key}": value for key, value in certificates.model_dump(exclude={"mutual"}).items()},
    }
    tokens = {"PENSTOCK_TOKEN": TOKEN, "PENSTOCK_NATS_TOKEN": NATS_TOKEN}
    arguments = (f"--{key}={value}" for key, value in overrides.items())
    with started(tmp_path, str(RECIPE), *arguments, environment=tokens) as train:
        await asyncio.to_thread(train.wait_until, lambda: any(train.runs.glob("*/live.toml")), "its addresses", 60.0)
        await assert_closed(train, certificates)
        assert await asyncio.to_thread(train.wait, 300) == 0, train.tail()
        yield train


async def assert_closed(train: TrainProcess, certificates: SecurityConfig) -> None:
    """Every port refuses a caller without the token or without a certificate of the authority.

    The first engine to join stands for all: the run waits for no other.
    """
    live = load(Recipe, [train.folder / "live.toml"])
    known, stranger = security_of(certificates, token=TOKEN), security_of(certificates, token=WRONG)
    async with RouterClient(f"127.0.0.1:{live.router.port}", security=known) as router:
        engine, *_ = await answered(train, lambda: addresses_of_engines(router))
    control = security_of(certificates, token=TOKEN, nats_token=NATS_TOKEN)
    async with TrainerClient(f"127.0.0.1:{live.trainer.port}", security=control) as trainer:
        assert (await answered(train, trainer.get_run)).num_steps == NUM_STEPS
    for address, method in (
        (f"127.0.0.1:{live.trainer.port}", "TrainerService/GetRun"),
        (f"127.0.0.1:{live.router.port}", "RouterService/ListReplicas"),
        (f"127.0.0.1:{live.reward.port}", "RewardService/Verify"),
        (engine, "RolloutService/PrepareWeights"),
    ):
        await assert_rpc_is_closed(address, f"/penstock.v1.{method}", security=stranger)
        async with RouterClient(address, security=Security(token=TOKEN)) as plain:
            with pytest.raises(UnavailableError, match="if it asks for TLS"):
                await plain.list_replicas(timeout_s=HANG_S)
    with pytest.raises(AccessError):
        async with connect(live.bus, run=live.run.name, security=stranger):
            pass


async def addresses_of_engines(router: RouterClient) -> list[str]:
    """Of those that have joined."""
    return [each.replica.address for each in (await router.list_replicas()).replicas]


async def answered(train: TrainProcess, ask: Callable[[], Awaitable[T]]) -> T:
    """The first answer that says something, while the run goes on."""
    answers: list[T] = []

    async def has_answered() -> bool:
        assert train.process.poll() is None, train.tail()
        with contextlib.suppress(UnavailableError, DeadlineError):
            answers.append(await ask())
        return bool(answers and answers[-1])

    await until(has_answered, 180.0)
    return answers[-1]


def test_no_secret_was_written_down(run: TrainProcess) -> None:
    """Not into a recipe, a log, a sample, or what NATS keeps."""
    files = [path for path in run.folder.rglob("*") if path.is_file()]
    assert len([path for path in files if path.suffix in (".toml", ".log", ".conf")]) >= 9
    for secret in (TOKEN, NATS_TOKEN):
        assert secret not in run.output.read_text()
        assert [path for path in files if secret.encode() in path.read_bytes()] == []


def write_rows(path: Path) -> None:
    """Rows in the schema of hiyouga/geometry3k: drawn problems, and pictures of every size and mode. An environment
    or an agent plays three of four."""
    rng = np.random.default_rng(0)
    drawn = GeometryDataset(12, seed=5)
    rows = [drawn[index] for index in range(12)]
    modes = [("RGB", (150, 211)), ("RGBA", (1600, 400)), ("P", (640, 480)), ("L", (333, 1201))]
    for mode, (width, height) in modes:
        picture = Image.fromarray(rng.integers(0, 255, (height // 8, width // 8, 3), dtype=np.uint8)).resize(
            (width, height)
        )
        file = io.BytesIO()
        picture.convert(mode).save(file, format="PNG")
        rows.append(
            {
                "images": [{"bytes": file.getvalue(), "path": None}],
                "problem": "<image>In \\(\\triangle ABC\\),\r\nfind $x$ if $m\\angle A = 3x^\\circ$.",
                "answer": "\\frac { 3 \\sqrt { 2 } } { 2 }",
            }
        )
    environments = [{"environment": (SECOND_PICTURE, AGENT, None, AGENT)[index % 4]} for index in range(len(rows))]
    pq.write_table(pa.Table.from_pylist([row | named for row, named in zip(rows, environments, strict=True)]), path)


def test_every_row_is_trained_once_and_on_time(run: TrainProcess) -> None:
    """Each step trains exactly the groups admitted for it, as they come, with staleness 0."""
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    wanted = [list(range(first, first + GROUPS_PER_STEP)) for first in range(0, 16, GROUPS_PER_STEP)]
    assert [sorted(row["groups"]) for row in rows] == wanted
    assert all(row["staleness_max"] == 0 for row in rows)


def test_engine_and_trainer_agree_on_logprobs(run: TrainProcess) -> None:
    """Real SGLang and the trainer's model give the same logprob for every sampled token, pictures included."""
    for row in run.rows():
        assert row["num_tokens"] > 0
        assert row["dlogp_max"] < MAX_DLOGP, row


def test_kept_episodes_have_the_numbers_of_every_token(run: TrainProcess) -> None:
    """The group whose tokens differ most is always kept, and shows the difference that the step's metrics report."""
    lines = (run.folder / "episodes" / "index.jsonl").read_text().splitlines()
    kept = [entry for entry in map(json.loads, lines) if entry["outcome"] == "trained"]
    for row in run.rows():
        of_step = [entry for entry in kept if entry["step"] == row["step"]]
        computed = [entry["dlogp_max"] for entry in of_step if entry["dlogp_max"] is not None]
        assert max(computed) == pytest.approx(row["dlogp_max"], rel=1e-4)
        assert {entry["index"] for entry in of_step} <= set(row["groups"])


def played_by(run: TrainProcess, environment: str) -> list[list[tuple[Sample, ...]]]:
    """The samples of each group of each step that an environment or an agent played."""
    recorded = [read_recording(run.folder / "groups", step).groups for step in range(1, NUM_STEPS + 1)]
    return [[group.samples for group in groups if group.environment == environment] for groups in recorded]


def test_a_picture_of_a_later_turn_is_trained(run: TrainProcess) -> None:
    """A quarter of the groups: in one sequence, the prompt's picture, a turn, the environment's picture, a turn.

    They are in the comparison of log-probabilities above.
    """
    samples = [sample for groups in played_by(run, SECOND_PICTURE) for group in groups for sample in group]
    assert len(samples) == 4 * NUM_STEPS * GROUPS_PER_STEP / 4
    shown = [sample for sample in samples if len(sample.turns) == 2]
    assert shown, "every sample ended with its first turn: the test proves nothing"
    assert {(len(sample.sequences), len(sample.sequences[0].images)) for sample in shown} == {(1, 2)}


def test_an_agent_s_conversations_are_trained(run: TrainProcess) -> None:
    """Half of the groups: each sample is one sequence, in which both tries are the policy's own tokens, and is trained.

    Row by row they are in the accounting and in the comparison of log-probabilities above.
    """
    played = played_by(run, AGENT)
    samples = [sample for groups in played for group in groups for sample in group]
    assert len(samples) == 4 * NUM_STEPS * GROUPS_PER_STEP / 2
    assert {(len(sample.sequences), sample.error, sample.verdict) for sample in samples} == {(1, "", None)}
    for sample in samples:
        [sequence] = sample.sequences
        num_runs = (np.diff(sequence.loss_mask.astype(np.int8)) == 1).sum()
        assert num_runs == len(sample.turns)
        assert (sample.reward == 1.0) == (len(sample.turns) == 1)
    differ = [any(len({sample.reward for sample in group}) > 1 for group in groups) for groups in played]
    assert any(differ), "no sample differs from the others of its group: the test proves nothing"
    for row, has_advantage in zip(run.rows(), differ, strict=True):
        assert row["grad_norm"] > 0 or not has_advantage


def test_samples_of_a_group_share_one_prefill(run: TrainProcess) -> None:
    """One computes the prompt. The others compute its last token, since the cache has no logits, and so does each later
    turn beside what the environment added: with prompts of dozens of tokens, at most a tenth of what is needed."""
    for row in run.rows():
        groups = read_recording(run.folder / "groups", row["step"]).groups
        for group in groups:
            *others, _ = sorted(turn.num_prompt_tokens - turn.num_cached_tokens for turn in first_turns(group.samples))
            assert others == [1] * 3
        assert row["prefill_ratio"] <= 1.1


def first_turns(samples: Sequence[Sample]) -> list[Turn]:
    """Of each sample."""
    return [sample.turns[0] for sample in samples]


def test_every_push_was_verified(run: TrainProcess) -> None:
    """No push left a replica out; one counts as reached only after its weights' digests equalled the trainer's."""
    for row in run.rows():
        assert row["push_failed_replicas"] == 0
        assert row["push_replicas"] >= 1


def test_parameters_equal_a_plain_synchronous_loop(run: TrainProcess) -> None:
    """The same samples through a loop without processes, queues or pushes give the same parameters, bit for bit.

    It computes groups in the chunks in which they came. A loop that computes each batch at once, in order of index, has
    the same losses and gradients within rounding errors.
    """
    recipe = load(Recipe, [run.folder / "config.toml"])
    sampling = {"seed": recipe.run.seed, "temperature": recipe.sampling.temperature}
    plain, whole = (InProcessBackend(recipe.model.path, recipe.trainer, recipe.algorithm, **sampling) for _ in "12")
    plain.load(None)
    whole.load(None)
    before = {name: tensor.clone() for name, tensor in plain.export()}
    reader = open_reader(recipe.model.path)
    for step in range(1, NUM_STEPS + 1):
        recording = read_recording(run.folder / "groups", step)
        groups = [reader.read(group, recording.images) for group in recording.groups]
        coming = iter(groups)
        take_step(plain, [list(islice(coming, size)) for size in recording.inputs.chunks], step)
        metrics = take_step(whole, [sorted(groups, key=lambda group: group.index)], step)
        row = run.rows()[step - 1]
        assert row["num_chunks"] == len(recording.inputs.chunks)
        assert row["loss"] == pytest.approx(metrics["loss"], abs=1e-5)
        assert row["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-3)
    trained = InProcessBackend(recipe.model.path, recipe.trainer, recipe.algorithm, **sampling)
    trained.load(run.folder / "checkpoints" / f"step-{NUM_STEPS:06d}")
    weights = dict(plain.export())
    assert any(not torch.equal(before[name], weights[name]) for name in weights), (
        "nothing was trained: the test proves nothing"
    )
    for name, tensor in trained.export():
        assert torch.equal(tensor, weights[name]), name


def test_perfetto_shows_every_span(run: TrainProcess) -> None:
    """What all processes recorded is exported without a slice that Perfetto drops, on one clock: the router
    and an engine begin a call after the worker began the turn, and have its first token before the turn ends.
    """
    spans, file = TraceReader(run.folder).read().spans, io.BytesIO()
    write_trace_events(spans, file)
    assert find_faults(file.getvalue()) == []
    slices = [event for event in json.loads(file.getvalue())["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == len(spans)
    processes = {span.process.partition("-")[0] for span in spans}
    assert processes == {"trainer", "worker", "router", "rollout", "reward", "launcher"}
    played = {_request_of(span): span for span in spans if span.name == "turn"}
    for name in ("route.attempt", "call"):
        calls = [span for span in spans if span.name == name and _request_of(span) in played]
        assert calls, f"no {name} belongs to a turn: the test proves nothing"
        for span in calls:
            turn = played[_request_of(span)]
            assert turn.start - _CLOCK_S < span.start, (turn, span)
            first_token = span.start + (span.attributes.get("first_token_s") or 0.0)
            assert first_token < turn.start + turn.seconds + _CLOCK_S, (turn, span)


def test_each_kind_of_work_has_its_span(run: TrainProcess) -> None:
    """From a prompt's admission to the push of the weights that it trained, in the process that did the work. Each
    push has its stages in an engine."""
    spans = TraceReader(run.folder).read().spans
    names = {
        "launcher": {"process.starting", "process"},
        "trainer": {"group.admitted", "group.held", "wait_s", "train_s", "push", "push.stage", "checkpoint"},
        "worker": {"group.queued", "group.played", "episode", "session", "turn", "tool", "verify", "group.published"},
        "router": {"route.attempt", "session.call"},
        "rollout": {"call", "push.received", "paused"},
        "reward": {"judged"},
    }
    found = {process: {span.name for span in _of(spans, process)} for process in names}
    assert {process: missing for process in names if (missing := names[process] - found[process])} == {}
    groups = {span.attributes["group"] for span in spans if span.name == "group.held"}
    assert len(groups) == NUM_STEPS * GROUPS_PER_STEP
    for kinds in (
        *({"group.admitted"}, {"group.queued"}, {"group.played"}, {"group.published"}, {"route.attempt"}, {"call"}),
        {"turn", "session.call"},  # agents' calls are not the worker's
    ):
        assert groups <= {span.attributes.get("group") for span in spans if span.name in kinds}, kinds
    for span in spans:
        if span.name == "turn" and "error" not in span.attributes:
            parts = (span.attributes["wait_s"], span.attributes["decode_s"])
            assert min(parts) >= 0.0
            assert sum(parts) <= span.seconds + _CLOCK_S
    assert {span.attributes["step"] for span in spans if span.name == "checkpoint"} == {2, 4}
    for name in ("train_s", "push"):
        assert {span.attributes["step"] for span in spans if span.name == name} == {*range(1, NUM_STEPS + 1)}
    [engine] = {span.attributes["replica"] for span in spans if span.name == "push.stage"}
    stages = {span.attributes["version"] for span in spans if span.name == "push.stage"}
    assert {row["policy_version"] + 1 for row in run.rows()} <= stages, engine


def _of(spans: Sequence[Span], process: str) -> list[Span]:
    return [span for span in spans if span.process.partition("-")[0] == process]


def test_a_group_leaves_no_line_in_a_log(run: TrainProcess) -> None:
    """An ordinary one: its way is in the trace. What a service logs names the run, and what trainer and engine log the
    version of their weights."""
    lines = [
        json.loads(line)
        for log in (run.folder / "logs").glob("*.log")
        for line in log.read_text().splitlines()
        if line.startswith("{")
    ]
    own = [line for line in lines if line.get("level") in ("info", "warning", "error")]
    assert {line["service"].partition("-")[0] for line in own} >= {"trainer", "worker", "router"}
    assert [line for line in own if "group" in line] == []
    name = load(Recipe, [run.folder / "config.toml"]).run.name
    assert {line["run"] for line in own} == {name}
    received = {line["version"] for line in own if line["event"] == "weights.received"}
    assert received == set(range(1, NUM_STEPS + 2))
    assert [line["version"] for line in own if line["event"] == "run.ended"] == [NUM_STEPS + 1]


def _request_of(span: Span) -> str:
    """The group, sample and turn of a call, as the request's identity has them before its random end."""
    about = span.attributes
    return f"{about['group']}/{about['sample']}/{about['turn']}" if span.name == "turn" else about["request"][:-9]


def test_the_run_leaves_what_it_promises(run: TrainProcess) -> None:
    """Metrics, resolved recipe, curves, episodes with their pictures; no process."""
    assert (run.folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list((run.folder / "episodes" / "images").glob("*.png"))
    assert (run.folder / "trace" / "trainer.jsonl").read_text().count("\n") == NUM_STEPS
    assert run.left_behind() == []
