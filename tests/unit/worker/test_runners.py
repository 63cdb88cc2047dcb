"""Runners: whatever people's code does becomes a result or a reason."""

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from fastapi import FastAPI, Request, Response

from penstock.agents import AgentResult, AgentSession
from penstock.config import SecurityConfig
from penstock.environments import Task
from penstock.errors import ConfigError
from penstock.http.server import HttpServer
from penstock.records import ImagePart, Message, TextPart, ToolCall, Verdict
from penstock.runtime.children.reaper import Reaper
from penstock.runtime.security import Security
from services.rollout.worker.agents import agent_player, command_runner
from services.rollout.worker.agents.command_runner import CommandRunner
from services.rollout.worker.agents.config import AgentConfig
from services.rollout.worker.agents.http_runner import HttpRunner
from services.rollout.worker.agents.runners import FunctionRunner, RunnerError, load_runner
from services.rollout.worker.config import WorkerConfig
from services.rollout.worker.episodes.clock import EpisodeClock
from tests.support.processes import is_alive
from tests.support.waiting import promptly, until

MakeProgram: TypeAlias = Callable[[str], CommandRunner]
ROOT = Path(__file__).parents[3]


async def no_grade(text: str) -> Verdict:
    raise AssertionError(text)


SESSION = AgentSession(
    base_url="http://router/sessions/x/v1",
    router_url="http://router",
    headers={"x-penstock-session": "x"},
    api_key="key",
    timeout_s=7.0,
    task=Task(
        id="run/0/0/a/1",
        seed=5,
        messages=(
            Message(role="user", parts=(TextPart(text="Look: "), ImagePart(index=0))),
            Message(role="assistant", parts=(), tool_calls=(ToolCall(name="add", arguments={"a": 1}),)),
            Message(role="tool", parts=(TextPart(text="2"),)),
        ),
        images=(b"\xff\xd8\xff jpeg",),
        golds=("3",),
        extra={"level": 2},
        grade=no_grade,
    ),
)


@pytest.fixture
async def reaper() -> AsyncIterator[Reaper]:
    """As a worker has one."""
    reaper = await Reaper.start()
    yield reaper
    await reaper.end()


@pytest.fixture
def program(tmp_path: Path, reaper: Reaper) -> MakeProgram:
    """Makes runners that run some code."""

    def make(code: str) -> CommandRunner:
        file = tmp_path / "runner.py"
        file.write_text(f"import json, os, sys, time\n{code}\n")
        return CommandRunner([sys.executable, "-S", str(file)], reaper)

    return make


def test_the_row_is_shown_in_openais_form() -> None:
    """As a client sends it: images inside, calls with ids and JSON."""
    user, assistant, tool = SESSION.messages
    assert user["content"][0] == {"type": "text", "text": "Look: "}
    assert user["content"][1]["image_url"]["url"] == "data:image/jpeg;base64,/9j/IGpwZWc="
    [call] = assistant["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 1})
    assert tool == {"role": "tool", "content": "2"}
    assert json.loads(json.dumps(SESSION.to_json()))["task"]["messages"] == SESSION.messages


async def test_a_runner_that_will_not_end_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """It catches its own cancellation; its sample ends all the same."""
    monkeypatch.setattr(agent_player, "_END_S", 0.05)
    released, tasks = asyncio.Event(), list[asyncio.Task[None] | None]()

    async def cling(session: AgentSession) -> float:
        tasks.append(asyncio.current_task())
        while not released.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await released.wait()
        return 1.0

    async def take_nothing(_: asyncio.Task[AgentResult]) -> None:
        pass

    assert await agent_player._limited(FunctionRunner(cling).run(SESSION), EpisodeClock(0.05), take_nothing) is None
    [task] = tasks
    assert task is not None
    assert not task.done()
    released.set()
    await asyncio.wait({task})


async def test_an_object_can_be_a_runner() -> None:
    """Whose call is a coroutine."""

    class Agent:
        async def __call__(self, session: AgentSession) -> float:
            return 0.25

    assert (await FunctionRunner(Agent()).run(SESSION)).reward == 0.25


async def test_what_a_function_raises_is_the_reason() -> None:
    """Also what would end the process."""

    def leave(session: AgentSession) -> None:
        sys.exit("bye")

    async def fail(session: AgentSession) -> None:
        raise TimeoutError("of its own")

    async def leave_in_a_coroutine(session: AgentSession) -> None:
        sys.exit("of the whole worker")

    async def cancel_itself(session: AgentSession) -> None:
        waiting = asyncio.create_task(asyncio.sleep(60.0))
        asyncio.get_running_loop().call_soon(waiting.cancel)
        await waiting

    with pytest.raises(RunnerError, match="nobody has cancelled it"):
        await FunctionRunner(cancel_itself).run(SESSION)
    with pytest.raises(RunnerError, match=r"SystemExit\('bye'\)"):
        await FunctionRunner(leave).run(SESSION)
    with pytest.raises(RunnerError, match=r"SystemExit\('of the whole worker'\)"):
        await FunctionRunner(leave_in_a_coroutine).run(SESSION)
    with pytest.raises(RunnerError, match=r"^TimeoutError: of its own$"):
        await FunctionRunner(fail).run(SESSION)


async def test_a_program_reads_the_session_and_writes_a_result(
    program: MakeProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it logs is its own, and it does not see the services' token."""
    monkeypatch.setenv("PENSTOCK_TOKEN", "secret")
    runner = program(
        "given = json.load(sys.stdin)\nprint('x' * 10**6, file=sys.stderr)\n"
        "assert 'secret' not in str(os.environ)\n"
        "print(json.dumps({'reward': given['task']['extra']['level'], 'metrics': {'seed': given['task']['seed']}}, "
        "indent=2))",
    )
    result = await runner.run(SESSION)
    assert (result.reward, result.metrics) == (2, {"seed": 5})


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("print('{}')\nprint('{}')", "it answered more than once; write one JSON object to the output"),
        ("", "it answered nothing; write one JSON object to the output"),
        ("print('hello')\nprint('{}')", r"holds something beside the result: 'hello\\n\{\}'; write logs to the errors"),
        ("print('[1]')", r"it wrote b'\[1\]\\n'; write one JSON object"),
        ("print('{}')\nsys.exit(3)", "exit code 3: it wrote nothing to its errors"),
        ("os.kill(os.getpid(), 9)", "ended with signal 9"),
        ("raise ValueError('no')", "exit code 1: Traceback.*ValueError: no"),
        ("print('x' * 3 * 10**6)\ntime.sleep(100)", "more than 1048576 bytes"),
    ],
)
async def test_what_goes_wrong_in_a_program_is_told(program: MakeProgram, code: str, reason: str) -> None:
    """Whether it read its input or not."""
    with pytest.raises(RunnerError, match=f"(?s){reason}"):
        await program(code).run(SESSION)


@pytest.mark.parametrize("own_group", [False, True])
async def test_what_a_program_leaves_running_does_not_delay_its_result(
    program: MakeProgram, tmp_path: Path, own_group: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server or a browser that it started holds its output open, and ends with it; one that has left the group does
    not end, and is waited for no longer than seconds."""
    monkeypatch.setattr(command_runner, "_RESULT_S", 3600.0)
    if own_group:
        monkeypatch.setattr(command_runner, "_END_S", 0.2)
    file = tmp_path / "pid"
    left = f"subprocess.Popen(['sleep', '3600'], start_new_session={own_group})"
    code = f"import subprocess\nopen({str(file)!r}, 'w').write(str({left}.pid))\nprint('{{\"reward\": 3}}')"
    assert (await promptly(program(code).run(SESSION))).reward == 3
    pid = int(file.read_text())
    if own_group:
        os.kill(pid, signal.SIGKILL)
    await until(lambda: not is_alive(pid))


async def test_the_end_of_a_program_is_heard_of_at_once(program: MakeProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks for it where it has closed its pipes."""
    monkeypatch.setattr(command_runner, "_LOOK_EVERY_S", 3600.0)
    assert (await promptly(program("print('{\"reward\": 3}')").run(SESSION))).reward == 3


async def test_a_program_may_leave_its_input_unread_to_others(program: MakeProgram, tmp_path: Path) -> None:
    """Who hold that pipe open, and no other; its sample ends with the program all the same."""
    file = tmp_path / "pid"
    left = "subprocess.Popen(['sleep', '3600'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)"
    code = f"import subprocess\nopen({str(file)!r}, 'w').write(str({left}.pid))\nprint('{{\"reward\": 3}}')"
    task = dataclasses.replace(SESSION.task, extra={"text": "x" * 100_000})  # more than a pipe holds
    result = await promptly(program(code).run(dataclasses.replace(SESSION, task=task)))
    assert result.reward == 3
    await until(lambda: not is_alive(int(file.read_text())))


async def test_what_a_program_pipes_its_output_through_may_end_after_it(
    tmp_path: Path, reaper: Reaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A filter writes the result later, however little it may go on for after that."""
    monkeypatch.setattr(command_runner, "_FILTERS_S", 0.0)
    file = tmp_path / "piped.sh"
    file.write_text("exec > >(sleep 0.8; cat); echo '{\"reward\": 1}'")
    assert (await CommandRunner(["bash", str(file)], reaper).run(SESSION)).reward == 1


async def test_a_program_that_is_cancelled_is_gone_with_its_children(program: MakeProgram, tmp_path: Path) -> None:
    """The whole process group is killed."""
    file = tmp_path / "pids"
    code = f"child = os.fork()\nopen({str(file)!r}, 'a').write(f'{{os.getpid()}}\\n')\ntime.sleep(3600)"
    task = asyncio.create_task(program(code).run(SESSION))
    await until(lambda: file.exists() and len(file.read_text().split()) == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not any(is_alive(int(pid)) for pid in file.read_text().split()))


async def test_a_program_that_is_cancelled_while_it_starts_is_gone_with_its_children(
    program: MakeProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may run already when nobody has heard of it yet."""
    start, goes_on = asyncio.create_subprocess_exec, asyncio.Event()

    async def start_slowly(*arguments: Any, **settings: Any) -> asyncio.subprocess.Process:
        process = await start(*arguments, **settings)
        await goes_on.wait()
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_slowly)
    file = tmp_path / "pids"
    code = f"child = os.fork()\nopen({str(file)!r}, 'a').write(f'{{os.getpid()}}\\n')\ntime.sleep(3600)"
    task = asyncio.create_task(program(code).run(SESSION))
    await until(lambda: file.exists() and len(file.read_text().split()) == 2)
    task.cancel()
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not any(is_alive(int(pid)) for pid in file.read_text().split()))


async def test_a_service_gets_the_session_and_answers_with_the_result(reaper: Reaper) -> None:
    """What it does not do right is told with what it said."""
    app, heard = FastAPI(), list[Any]()

    @app.post("/{what}")
    async def play(what: str, request: Request) -> Response:
        heard.append(await request.json())
        if what == "fails":
            return Response("no browser left", status_code=500)
        return Response("nonsense" if what == "nonsense" else '{"reward": 0.5}')

    server = HttpServer(app, host="127.0.0.1", port=0, security=Security())
    await server.start()
    try:
        result = await load_runner("a", AgentConfig(url=f"{server.url}/play"), reaper).run(SESSION)
        assert (result.reward, heard) == (0.5, [SESSION.to_json()])
        for what, reason in (("fails", "answered 500: no browser left"), ("nonsense", "'nonsense', which is not JSON")):
            with pytest.raises(RunnerError, match=reason):
                await load_runner("a", AgentConfig(url=f"{server.url}/{what}"), reaper).run(SESSION)
    finally:
        await server.drain(0.0)
    with pytest.raises(RunnerError, match="does not answer: ConnectError"):
        await load_runner("a", AgentConfig(url=f"{server.url}/play"), reaper).run(SESSION)


async def test_a_service_is_called_whatever_proxies_the_environment_names(
    monkeypatch: pytest.MonkeyPatch, reaper: Reaper
) -> None:
    """A proxy would not know it, and would see the session's key."""
    app = FastAPI()

    @app.post("/play")
    async def play() -> Response:
        return Response('{"reward": 0.5}')

    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")  # nobody listens there
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    server = HttpServer(app, host="127.0.0.1", port=0, security=Security())
    await server.start()
    try:
        assert (await load_runner("a", AgentConfig(url=f"{server.url}/play"), reaper).run(SESSION)).reward == 0.5
    finally:
        await server.drain(0.0)


@pytest.mark.parametrize("url", ["http://agents:port/play", "http://agents:99999/play", "http:///play", "http://[::1/"])
async def test_a_url_that_nobody_can_call_is_refused(url: str) -> None:
    """With the configuration; a runner that is given one all the same says so."""
    with pytest.raises(ValueError, match=f"url = '{re.escape(url)}' must be http://host:port/path or https://"):
        AgentConfig(url=url)
    with pytest.raises(RunnerError, match="does not answer"):
        await HttpRunner(url).run(SESSION)


def test_a_program_that_answers_often_is_read_to_its_second_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte of small values would hold the event loop for a second."""
    texts, decode = list[str](), json.JSONDecoder.raw_decode

    def raw_decode(decoder: json.JSONDecoder, text: str, *where: int) -> tuple[Any, int]:
        texts.append(text)
        return decode(decoder, text, *where)

    monkeypatch.setattr(json.JSONDecoder, "raw_decode", raw_decode)
    output = b"\n" + b"{} \n" * 100
    with pytest.raises(RunnerError, match="it answered more than once"):
        command_runner._read_one(output)
    assert (len(texts), set(texts)) == (2, {output.decode().rstrip()})
    assert command_runner._read_one(b' {"reward": 1}\n') == {"reward": 1}


@pytest.mark.parametrize("num_metrics", [1, 5000])
async def test_a_long_result_is_read_beside_the_event_loop(
    program: MakeProgram, monkeypatch: pytest.MonkeyPatch, num_metrics: int
) -> None:
    """Other episodes go on meanwhile."""
    threads, read = list[threading.Thread](), AgentResult.read

    def read_here(value: object) -> AgentResult:
        threads.append(threading.current_thread())
        return read(value)

    monkeypatch.setattr(AgentResult, "read", read_here)
    runner = program(f"print(json.dumps(dict(metrics=dict((str(n), n) for n in range({num_metrics})))))")
    result = await runner.run(SESSION)
    assert len(result.metrics) == num_metrics
    assert [each is threading.main_thread() for each in threads] == [num_metrics == 1]


def test_an_agent_is_one_of_three(reaper: Reaper) -> None:
    """Names that cannot be loaded are refused at the start."""
    config = WorkerConfig.model_validate({"agents": {"a": {"function": "os:getcwd"}}})
    assert config.agents["a"] == AgentConfig(function="os:getcwd")
    with pytest.raises(ValueError, match=r"exactly one of function, command and url, not \['function', 'url'\]"):
        AgentConfig(function="a:b", url="http://x")
    with pytest.raises(ValueError, match="must be http://host:port/path or https://"):
        AgentConfig(url="agents:9000")
    with pytest.raises(ValueError, match=r"\['a'\] are names of agents and of environments; rename one"):
        WorkerConfig.model_validate({"agents": {"a": {"function": "os:getcwd"}}, "environments": {"a": "os:getcwd"}})
    for path in ("os", "os:nothing", "nowhere:f", ":f", ".agent:f"):
        with pytest.raises(ConfigError, match=rf'worker.agents.x.function = "{path}" cannot be loaded'):
            load_runner("x", AgentConfig(function=path), reaper)


@pytest.mark.parametrize("code", ["raise SystemExit(3)", "import os\nos.environ['ABSENT']", "def play("])
def test_an_agent_whose_module_fails_is_refused_with_the_reason(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reaper: Reaper
) -> None:
    """Whatever it raises while it is imported."""
    (tmp_path / "failing_agent.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"cannot be loaded \((SystemExit: 3|KeyError: 'ABSENT'|SyntaxError: .*)\);"):
        load_runner("x", AgentConfig(function="failing_agent:play"), reaper)


def test_a_session_key_opens_its_session_and_says_nothing_of_the_token() -> None:
    """Without a token nothing is asked for."""
    security = Security.load(SecurityConfig(), {"PENSTOCK_TOKEN": "secret"})
    key = security.key_of("one")
    assert security.admits(f"Bearer {key}".encode(), key_name="one")
    assert security.admits(b"Bearer secret", key_name="one")
    assert not security.admits(f"Bearer {key}".encode(), key_name="two")
    assert not security.admits(f"Bearer {key}".encode())
    assert not security.admits(b"", key_name="one")
    assert key != Security.load(SecurityConfig(), {"PENSTOCK_TOKEN": "other"}).key_of("one")
    assert Security().key_of("one") == ""


def test_the_guide_shows_the_example() -> None:
    """Line for line."""
    assert (ROOT / "examples/agent/guesser.py").read_text() in (ROOT / "docs/rollouts/agents.md").read_text()
