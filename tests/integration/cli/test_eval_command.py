"""`penstock eval` with the real services; the engine alone is simulated, so that its answers are known."""

import asyncio
import contextlib
import json
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from transformers import AutoTokenizer

from penstock.bus.buckets.lock import EVALUATION, locked
from penstock.bus.connection import connect
from penstock.config import BusConfig, load
from penstock.testing.answers import Saying
from penstock.testing.simulated_engine import SimulatedEngine
from services.cli import main
from services.recipe import Recipe
from services.reward import server as reward_server
from services.reward.config import RewardConfig
from services.rollout.testing.engine_process import START_TIMEOUT_S
from services.trainer.checkpoint.store import CheckpointStore
from services.trainer.evaluation.openai_server import read_api_key
from services.view.run_reader import RunReader
from services.view.trace_reader import TraceReader
from tests.support.openai_api import serving_api

pytestmark = pytest.mark.timeout(600)

PENSTOCK = Path(sys.executable).parent / "penstock"
ROOT = Path(__file__).parents[3]
ROWS = [{"problem": f"{number}?", "answer": answer} for number, answer in enumerate(["3", "4", "3", "3"])]


@pytest.fixture
def recipe(tmp_path: Path, tiny_model_path: Path, nats_url: str, run_name: str) -> Path:
    """A recipe without engines of its own, with a set of four rows."""
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    file = tmp_path / "recipe.toml"
    file.write_text(
        f'[run]\nname = "{run_name}"\ndir = "{tmp_path}/runs"\ngrace_s = 1.0\n[model]\npath = "{tiny_model_path}"\n'
        f'[bus]\nurl = "{nats_url}"\n[rollout]\nreplicas = 0\n[reward]\nworkers = 1\n'
        f'[evaluation.sets.four]\npath = "{tmp_path}/test.jsonl"\nprofile = "math"\nsamples_per_prompt = 2\n'
        "max_new_tokens = 16\n"
    )
    return file


@pytest.fixture
async def engine(nats_url: str, run_name: str, tiny_model_path: Path) -> AsyncIterator[SimulatedEngine]:
    """An engine of the evaluation's run that answers 3, as version 0."""
    tokenizer = AutoTokenizer.from_pretrained(str(tiny_model_path))
    ids = tokenizer("\\boxed{3}<|im_end|>", add_special_tokens=False).input_ids
    async with connect(BusConfig(url=nats_url), run=f"{run_name}-eval") as bus:
        async with SimulatedEngine(bus, answer=Saying(ids), policy_version=0).running() as engine:
            yield engine
        await bus.delete_run()


@contextlib.asynccontextmanager
async def evaluating(*arguments: str | Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """A `penstock eval`; what a failing test leaves of it is killed, and its processes with it."""
    command = await asyncio.create_subprocess_exec(
        PENSTOCK, "eval", *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        yield command
    finally:
        if command.returncode is None:
            command.kill()
            await command.communicate()


async def finished(command: asyncio.subprocess.Process) -> tuple[str, str]:
    """What it wrote, once it has ended: it starts three services, which on a busy machine takes minutes."""
    out, err = await asyncio.wait_for(command.communicate(), START_TIMEOUT_S)
    return out.decode(), err.decode()


async def all_up(command: asyncio.subprocess.Process) -> None:
    """Return once it has said that all its processes are up."""
    assert command.stdout is not None
    up: set[str] = set()
    while up < {"reward", "router", "worker-0"}:
        line = (await asyncio.wait_for(command.stdout.readline(), START_TIMEOUT_S)).decode()
        assert line, await command.communicate()
        up |= {line.split()[0]} if "is up" in line else set()


async def test_a_whole_evaluation(recipe: Path, engine: SimulatedEngine) -> None:
    """Table, files, trace, kept groups and exit code; the numbers are those of the answers."""
    async with evaluating(recipe) as command:
        out, err = await finished(command)
    assert (command.returncode, err) == (0, ""), out
    [row] = [line.split() for line in out.splitlines() if line.startswith("four") and "±" in line]
    assert row[:6] == ["four", "4", "2", "0.750", "±", "0.250"]
    [folder] = (recipe.parent / "runs").iterdir()
    results = json.loads((folder / "evaluation.json").read_text())
    found = results["sets"]["four"]
    assert (found["score"]["value"], found["pass_at"]["2"]["value"], found["num_failed_prompts"]) == (0.75, 0.75, 0)
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert {line["row"]: line["samples"][0]["score"] for line in lines} == {0: 1.0, 1: 0.0, 2: 1.0, 3: 1.0}
    assert {tuple(line["versions"]) for line in lines} == {(0, 0)}
    assert (folder / "samples.html").read_text().count('class="answer right"') == 6
    assert not psutil.pid_exists(command.pid)
    trace = TraceReader(folder).read()
    played = [span for span in trace.spans if span.name == "group.played"]
    assert (len(played), trace.num_dropped, trace.num_lost_batches) == (4, 0, 0)
    names = {span.process: {each.name for each in trace.spans if each.process == span.process} for span in trace.spans}
    assert names["worker-0"] >= {"group.queued", "episode", "turn", "verify"}
    assert names["router"] - {"route.queued"} == {"route.attempt"}  # waits below a millisecond are left out
    assert (names["reward"], names["launcher"]) == ({"judged"}, {"process", "process.starting"})
    run = RunReader(folder)
    assert {(each["source"], each["row"]) for each in run.episodes()} == {("eval/four", row) for row in range(4)}
    [evaluation] = run.evaluations()
    assert (evaluation["step"], evaluation["sets"]["four"]["score"]["value"]) == (0, 0.75)


@pytest.mark.parametrize("column", ["", "env"])
def test_turns_over_an_api_are_refused_before_anything_starts(
    recipe: Path, column: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether the set or one of its rows has an environment: no request is paid for, and no folder is left."""
    rows = [{**row, "env": "geo3k_tools" if row is ROWS[-1] else "single_turn"} for row in ROWS]
    (recipe.parent / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    key, value = ("environment_column", column) if column else ("environment", "geo3k_tools")
    with serving_api() as api:
        assert main(["eval", str(recipe), f"--url={api.url}", f"--evaluation.sets.four.{key}={value}"]) == 2
        assert api.requests == []
    assert "evaluation.sets.four: environment 'geo3k_tools' cannot be played by --url" in capsys.readouterr().err
    assert not (recipe.parent / "runs").exists()


@pytest.mark.slow
def test_an_evaluation_shows_its_progress_on_a_terminal(recipe: Path) -> None:
    """A bar for each set: prompts played, of all, and the score so far."""
    terminal, end = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "160"}
    with serving_api() as api:
        command = [PENSTOCK, "eval", recipe, f"--url={api.url}"]
        with subprocess.Popen(command, stdout=end, stderr=subprocess.PIPE, env=environment) as process:
            os.close(end)
            shown = b""
            with contextlib.suppress(OSError), os.fdopen(terminal, "rb", buffering=0) as opened:  # EIO ends a terminal
                while piece := opened.read(65536):
                    shown += piece
            _, err = process.communicate(timeout=START_TIMEOUT_S)
    assert (process.returncode, err) == (0, b""), shown
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert re.search(r"four .* 0/4", text)
    assert re.search(r"four .* 4/4 score 0\.750", text)
    assert re.search(r"^four +4 +2 +0\.750", text, re.MULTILINE), "the table comes after the bar"


@pytest.mark.slow
async def test_ctrl_c_keeps_what_was_played(recipe: Path, engine: SimulatedEngine) -> None:
    """Exit code 130, no process left, no results that look complete."""
    engine.hang_after = 1
    async with evaluating(recipe) as command:
        await all_up(command)
        children = psutil.Process(command.pid).children(recursive=True)
        command.send_signal(signal.SIGINT)
        out, err = await finished(command)
    assert (command.returncode, err) == (130, "")
    assert "stopped after 0 of 4 prompts" in out
    assert psutil.wait_procs(children, timeout=10.0)[1] == []
    [folder] = (recipe.parent / "runs").iterdir()
    assert not (folder / "evaluation.json").exists()


@pytest.mark.slow
async def test_a_live_run_keeps_the_checkpoint_that_is_evaluated(
    recipe: Path, engine: SimulatedEngine, tiny_model_path: Path
) -> None:
    """Until the evaluation has ended, also by kill -9."""

    def write(folder: Path) -> None:
        shutil.copytree(tiny_model_path, folder / "model")

    engine.hang_after = 1
    checkpoints = CheckpointStore(recipe.parent / "run/checkpoints", keep=1)
    checkpoints.save(1, {}, write)
    async with evaluating(recipe, f"--model={recipe.parent}/run") as command:
        await all_up(command)
        checkpoints.save(2, {}, write)
        assert checkpoints.steps() == [1, 2]
        command.kill()
        await finished(command)
    checkpoints.save(3, {}, write)
    assert checkpoints.steps() == [3]


@pytest.mark.slow
@pytest.mark.parametrize(
    "ending",
    [
        pytest.param(signal.SIGINT, id="stopped"),
        pytest.param(signal.SIGKILL, id="killed", marks=pytest.mark.variant),
    ],
)
async def test_an_interrupted_evaluation_goes_on(recipe: Path, ending: signal.Signals) -> None:
    """What was answered is neither asked nor judged again; the results are of all rows."""
    with serving_api() as api:
        api.num_answers = 4  # two prompts of two answers; one prompt is played at a time
        async with evaluating(recipe, f"--url={api.url}", "--worker.concurrency=1") as command:
            assert await asyncio.to_thread(api.hangs.wait, START_TIMEOUT_S)
            command.send_signal(ending)
            out, err = await finished(command)
        [folder] = (recipe.parent / "runs").iterdir()
        if ending is signal.SIGINT:
            assert (command.returncode, err) == (130, "")
            assert "stopped after 2 of 4 prompts" in out
            assert f"`penstock eval --resume {folder}` plays the others" in out
        asked = {request["messages"][0]["content"] for request in api.requests[:4]}
        assert len(asked) == 2
        api.num_answers = None
        num_before = len(api.requests)
        async with evaluating("--resume", folder, "--worker.concurrency=3") as command:
            out, err = await finished(command)
        assert (command.returncode, err) == (0, ""), out
        assert load(Recipe, [folder / "config.toml"]).worker.concurrency == 3
        again = [request["messages"][0]["content"] for request in api.requests[num_before:]]
        assert sorted(again) == sorted(2 * [f"{n}?" for n in range(4) if f"{n}?" not in asked])
        results = json.loads((folder / "evaluation.json").read_text())
        assert (results["num_prompts_played_before"], results["model"]) == (2, f"m at {api.url}")
        assert results["sets"]["four"]["score"]["value"] == 0.75
        lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
        assert sorted(line["row"] for line in lines) == [0, 1, 2, 3]
        num_before = len(api.requests)
        async with evaluating("--resume", folder) as command:
            out, err = await finished(command)
        assert (command.returncode, err, len(api.requests)) == (0, "", num_before)
        assert "0.750 ± 0.250" in out


@pytest.mark.slow
async def test_an_evaluation_with_engines_goes_on(recipe: Path, engine: SimulatedEngine) -> None:
    """With the model that it was begun with; only rows that have no answer go to the workers."""
    async with evaluating(recipe, "--evaluation.sets.four.num_prompts=3") as command:
        out, err = await finished(command)
    assert (command.returncode, err) == (0, ""), out
    [folder] = (recipe.parent / "runs").iterdir()
    lines = (folder / "samples.jsonl").read_text().splitlines()
    [kept] = [line for line in lines if json.loads(line)["row"] == 1]
    (folder / "samples.jsonl").write_text(f"{kept}\n{lines[0][:40]}")  # as a crash leaves it
    num_calls = engine.num_calls
    recipe_before = (folder / "config.toml").read_bytes()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        async with evaluating("--resume", folder, f"--router.port={taken.getsockname()[1]}") as command:
            out, err = await finished(command)
    assert (command.returncode, (folder / "config.toml").read_bytes()) == (2, recipe_before), err
    async with evaluating("--resume", folder, "--evaluation.sets.four.num_prompts=4") as command:
        out, err = await finished(command)
    assert (command.returncode, err) == (0, ""), out
    assert engine.num_calls - num_calls == 6
    results = json.loads((folder / "evaluation.json").read_text())
    assert (results["num_prompts_played_before"], results["sets"]["four"]["score"]["value"]) == (1, 0.75)
    assert (folder / "samples.jsonl").read_text().splitlines()[0] == kept
    assert sorted(each["row"] for each in RunReader(folder).episodes()) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--evaluation.sets.four.num_prompts=5"], "evaluation.sets.four.num_prompts = 5, but data.path"),
        (["--evaluation.sets.four.path=nowhere.jsonl"], "evaluation.sets.four: data.path = 'nowhere.jsonl'"),
        (["--evaluation.sets.four.answer_column=gold"], "evaluation.sets.four: data.path"),
        (["--model=nowhere"], "--model nowhere is neither a model folder"),
        (["--model=a", "--url=http://b/v1"], "--url http://b/v1 and --model a exclude each other"),
        (["--url-model=a"], "--url-model a needs --url"),
        ([f"--run.name={'a' * 124}"], f"run.name = '{'a' * 124}': the evaluation's own name"),
    ],
)
def test_mistakes_end_it_before_anything_starts(
    recipe: Path, arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, exit code 2, and no run folder."""
    assert main(["eval", str(recipe), *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {error}")
    assert len(err.splitlines()) == 1
    assert not (recipe.parent / "runs").exists()


@pytest.mark.slow
async def test_two_evaluations_of_a_name_do_not_share_a_bus(recipe: Path, nats_url: str, run_name: str) -> None:
    """Workers of either would play the prompts of both, each with its own model; the second is refused in a line."""
    bus = BusConfig(url=nats_url, lease_ttl_s=12.0)
    async with connect(bus, run=f"{run_name}-eval") as other:
        async with (
            locked(other, EVALUATION, ttl_s=bus.lease_ttl_s),
            evaluating(recipe, "--bus.lease_ttl_s=12") as command,
        ):
            out, err = await finished(command)
        await other.delete_run()
    assert (command.returncode, len(err.splitlines())) == (2, 1), err
    assert "another evaluation of this run is running already" in err
    assert "choose another run.name" in err
    assert "is removed: nothing was played" in out


def test_a_key_that_no_header_can_have_is_not_shown(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, and no run folder; a line break at the end, as a file of Kubernetes has it, is left out."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-\u201csecret")
    assert main(["eval", str(recipe), "--url=http://127.0.0.1:1/v1"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: OPENAI_API_KEY has characters that no key has")
    assert "secret" not in err
    assert not (recipe.parent / "runs").exists()
    assert read_api_key({"OPENAI_API_KEY": "sk-secret\r\n"}) == "sk-secret"


@pytest.mark.slow
async def test_the_reward_service_that_the_recipe_names_judges(recipe: Path) -> None:
    """Also over an API; a profile that it does not know is refused before anything is asked."""
    verifier = recipe.parent / "strict.py"
    verifier.write_text("def verify(golds, response, prompt): return response.endswith(golds[0] + '}')")
    reward = RewardConfig(workers=1, verifiers={"strict": f"{verifier}:verify"})
    with serving_api() as api:
        async with reward_server.running(reward) as service:
            options = [f"--url={api.url}", f"--worker.reward_address={service.rpc.address}"]
            async with evaluating(recipe, *options, "--evaluation.sets.four.profile=strict") as command:
                out, err = await finished(command)
            assert (command.returncode, err) == (0, ""), out
            num_asked = len(api.requests)
            async with evaluating(recipe, *options, "--evaluation.sets.four.profile=strct") as command:
                _, err = await finished(command)
        assert (command.returncode, len(err.splitlines()), len(api.requests)) == (2, 1, num_asked), err
        assert "evaluation.sets.four.profile = 'strct' is unknown; did you mean 'strict'?" in err


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["--url-model=some"]], ids=["finds the model", "knows the model"])
def test_an_api_that_is_away_leaves_no_folder(recipe: Path, arguments: list[str]) -> None:
    """Nobody listens at --url: one line, exit code 2, and what was made of the run folder is removed, on NFS too."""
    program = (
        "import pytest; from tests.support.nfs import rename_open_files; rename_open_files(pytest.MonkeyPatch()); "
        "import sys; from penstock.runtime.backoff import Backoff; from services.cli import main; "
        "from services.trainer.evaluation import openai_server; "
        "openai_server._BACKOFF = Backoff(first_s=0.001, max_s=0.001); sys.exit(main(sys.argv[1:]))"
    )
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
        command = [sys.executable, "-c", program, "eval", str(recipe), f"--url={url}", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False, cwd=ROOT)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert done.stderr.startswith(f"error: --url {url} ")
    assert "is removed: nothing was played" in done.stdout
    assert list((recipe.parent / "runs").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("full_from", "remedy"),
    [
        (2, "make room and continue with `penstock eval --resume {folder}`"),
        (0, "nothing was played: make room, remove {folder} and start the command again"),
    ],
)
def test_a_full_disk_is_one_line_with_how_to_go_on(recipe: Path, full_from: int, remedy: str) -> None:
    """The answers so far are kept; without any there is nothing to resume."""
    program = (
        "import errno, sys; from services.cli import main; from services.cli.evaluation.begun import Begun\n"
        "from services.trainer.evaluation.report import SamplesFile\n"
        "def filling(write):\n"
        "    def add(self, given):\n"
        f"        if getattr(given, 'row', 0) >= {full_from}: raise OSError(errno.ENOSPC, 'No space left on device')\n"
        "        write(self, given)\n"
        "    return add\n"
        "Begun.write = filling(Begun.write); SamplesFile.add = filling(SamplesFile.add); sys.exit(main(sys.argv[1:]))"
    )
    with serving_api() as api:
        options = [f"--url={api.url}", "--worker.concurrency=1"]
        command = [sys.executable, "-c", program, "eval", str(recipe), *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False)
    [folder] = (recipe.parent / "runs").iterdir()
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert "No space left on device; " in done.stderr
    assert remedy.format(folder=folder) in done.stderr
    kept = [json.loads(line)["row"] for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert kept == list(range(full_from))


def test_a_recipe_without_sets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error shows how to add one."""
    (tmp_path / "r.toml").write_text('[run]\nname = "r"\n')
    assert main(["eval", str(tmp_path / "r.toml")]) == 2
    assert "the recipe has no evaluation set; add one" in capsys.readouterr().err
