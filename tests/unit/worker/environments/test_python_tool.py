"""Code that a policy writes runs in real confined processes: what it may do, and what becomes of it."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from penstock.errors import SetupError
from services.rollout.worker.environments.confined_python.interpreter import Interpreter
from services.rollout.worker.environments.python import Python
from tests.support.processes import is_alive
from tests.support.waiting import HANG_S, settled, until
from tests.support.worker.tool_calls import texts, turn

REFUSED = "(Code has no network, no files and no other processes here.)"


@pytest.fixture(scope="module")
async def python() -> AsyncIterator[Python]:
    """One environment for the tests of this file that need no settings of their own."""
    environment = Python(time_limit_s=HANG_S)
    await run(environment, "")
    yield environment
    await environment.close()


async def run(environment: Python, *codes: str) -> list[str]:
    """What comes back."""
    async with asyncio.timeout(HANG_S):
        return texts((await environment.step(turn(*(("python", {"code": code}) for code in codes)))).observation)


async def run_alone(code: str, **settings: object) -> str:
    """In an environment of its own."""
    environment = Python(**settings)  # type: ignore[arg-type]
    try:
        [text] = await run(environment, code)
    finally:
        await environment.close()
    return text


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("print('a', 1)\nprint('b')", "a 1\nb"),
        ("x = 6\nx * 7", "42"),
        ("print('first')\n'last'", "first\n'last'"),
        ("x = 1", "It ended and printed nothing."),
        ("", "It ended and printed nothing."),
        ("None", "It ended and printed nothing."),
        ("import math\nmath.hypot(3, 4)", "5.0"),
        ("from fractions import Fraction\nFraction(1, 3) + Fraction(1, 6)", "Fraction(1, 2)"),
        ("import numpy as np\nfloat(np.linalg.det(np.array([[1., 2.], [3., 4.]])).__round__(6))", "-2.0"),
        ("import numpy as np\nnp.random.default_rng(0).integers(10, size=3).tolist()", "[8, 6, 5]"),
        ("import datetime\ndatetime.datetime.strptime('2020', '%Y').year", "2020"),
        ("import sys\nsys.stderr.write('told')\nsys.exit()", "told"),
        ("def f(n):\n    return 1 if n == 0 else n * f(n - 1)\nf(20)", "2432902008176640000"),
        ("print('\\ud800')", "\ufffd"),
    ],
)
async def test_what_is_printed_and_the_last_value_come_back(python: Python, code: str, answer: str) -> None:
    """As an interpreter would show them."""
    assert await run(python, code) == [answer]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def f():\n    return 1 / 0\nf()", 'File "<python>", line 2, in f\n    return 1 / 0\n'),
        ("def f():\n    return 1 / 0\nf()", "ZeroDivisionError: division by zero"),
        ("x = (", "SyntaxError: '(' was never closed"),
        ("undefined", "NameError: name 'undefined' is not defined"),
        ("raise SystemExit('why')", "SystemExit: why"),
        ("class E(BaseException): pass\nraise E('odd')", "E: odd"),
        ("f = lambda: f()\nf()", "RecursionError"),
        ("int('9' * 10_000)", "ValueError: Exceeds the limit"),
        ("input()", "EOFError"),
        ("import requests", "ModuleNotFoundError: requests cannot be imported here; these can: bisect, cmath"),
        ("import os\nos.abort()", "Its process crashed; it may have 256 MB of memory."),
        ("import os\nos._exit(0)", "Its process crashed"),
        ("x = 1\0", "source code string cannot contain null bytes"),
    ],
)
async def test_what_went_wrong_is_told(python: Python, code: str, words: str) -> None:
    """With the code's own lines, and none of the runner's."""
    [text] = await run(python, code)
    assert text.startswith("Error in python: ")
    assert words in text
    assert "execution.py" not in text


@pytest.mark.parametrize("code", ["import random\nrandom.random()", "import numpy as np\nfloat(np.random.rand())"])
async def test_each_call_draws_numbers_of_its_own(python: Python, code: str) -> None:
    """Though all are forked from one process."""
    assert len({*await run(python, code, code, code)}) == 3


async def test_what_was_printed_before_an_error_is_told(python: Python) -> None:
    """It is how people find mistakes."""
    [text] = await run(python, "print('so far')\n1/0")
    assert text.startswith("Error in python: so far\nTraceback")


@pytest.mark.parametrize(
    "code",
    [
        "import socket\nsocket.socket()",
        "import socket\nsocket.socketpair()",
        "import os\nos.fork()",
        "import os\nos.posix_spawn('/bin/true', ['true'], {})",
        "import os\nos.execv('/bin/true', ['true'])",
        "import os\nos.kill(os.getppid(), 9)",
        "import os\nos.kill(1, 0)",
        "open('/etc/passwd').read()",
        "open('/proc/self/environ').read()",
        "open('/dev/shm/left', 'w')",
        "import os\nos.listdir('/')",
        "import os\nos.stat('/etc/passwd')",
        "import os\nos.readlink('/proc/self/exe')",
        "import os\nos.chdir('/')",
        "import os\nos.unlink('/etc/passwd')",
        "import os\nos.memfd_create('x')",
    ],
)
async def test_system_calls_that_reach_out_are_refused(python: Python, code: str) -> None:
    """By the kernel; and the policy is told."""
    [text] = await run(python, code)
    assert "PermissionError: [Errno 1] Operation not permitted" in text
    assert text.endswith(REFUSED)


async def test_limits_cannot_be_lifted(python: Python) -> None:
    """Not even by the superuser, as workers in containers may be."""
    [text] = await run(python, "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))")
    assert text.endswith("ValueError: not allowed to raise maximum limit")


async def test_the_workers_environment_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hold a token."""
    monkeypatch.setenv("PENSTOCK_TEST_SECRET", "secret")
    text = await run_alone("import os\nsorted(os.environ)", max_characters=4001)
    assert "PATH" in text
    assert "PENSTOCK_TEST_SECRET" not in text


async def test_no_descriptor_of_the_workers_is_open(python: Python) -> None:
    """Only the null device and the socket of its own."""
    code = "import os\nfor fd in range(64):\n try:\n  print(fd, os.get_inheritable(fd))\n except OSError: pass"
    [text] = await run(python, code)
    numbers = [int(line.split()[0]) for line in text.splitlines()]
    assert numbers[:3] == [0, 1, 2]
    assert len(numbers) == 4


async def test_memory_is_limited(python: Python) -> None:
    """The limit is of what code allocates: what the interpreter itself takes is not counted."""
    [enough, too_much] = await run(python, "len(bytes(128 * 2**20))", "len(bytes(512 * 2**20))")
    assert enough == str(128 * 2**20)
    assert too_much == "Error in python: MemoryError: the code needs more memory than it may have"


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time\ntime.sleep(10**6)",
        "10 ** 10 ** 9 > 0",
        "try:\n    while True: pass\nfinally:\n    while True: pass",
    ],
)
async def test_code_that_does_not_end_is_ended(code: str) -> None:
    """Whether it computes or sleeps; and its process is gone."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    assert await run_alone(code, time_limit_s=0.5) == "Error in python: It was ended after 0.5 s."
    await until(lambda: {child.pid for child in psutil.Process().children(recursive=True)} <= before)


async def test_what_was_printed_before_time_ran_out_is_told() -> None:
    """Each print is sent at once. Where a machine is too busy for a print within the limit, a longer one is tried."""
    for limit_s in (1, 5, 25):
        text = await run_alone("print('so far')\nwhile True: pass", time_limit_s=limit_s)
        if "so far" in text:
            break
    assert text == f"Error in python: so far\nIt was ended after {limit_s} s."


async def test_a_hundred_megabytes_of_output_are_cut(python: Python) -> None:
    """In one piece or in many; and a value in the same way."""
    [piece, pieces, value] = await run(
        python, "print('x' * 10**8)", "for _ in range(10**5): print('y' * 1000)", "'z' * 10**7"
    )
    assert piece == "x" * 4000 + "\n... (99996001 characters more were printed)"
    assert pieces.endswith("(100096000 characters more were printed)")
    assert len(pieces) < 4100
    assert value == "'" + "z" * 3999 + "... (9996002 characters more)"


async def test_output_past_the_runners_own_limit_ends_the_process(python: Python) -> None:
    """Code can write to the socket itself: what comes from it is bounded at this end, too."""
    flood = "import os\nfor fd in range(3, 64):\n try:\n  while True: os.write(fd, bytes(2**20))\n except OSError: pass"
    assert await run(python, flood) == ["Error in python: Its process crashed; it may have 256 MB of memory."]


async def test_reports_past_the_limit_end_the_process(python: Python) -> None:
    """The limit on what is printed does not depend on the process keeping to it."""
    forged = (
        "from penstock.runtime.isolation.frames import frame, write_all\n"
        "from services.rollout.worker.environments.confined_python.messages import Printed\n"
        "data = frame(Printed(text='x' * 4000))\n"
        "for fd in range(3, 64):\n try:\n  while True: write_all(fd, data)\n except OSError: pass"
    )
    [text] = await run(python, forged)
    assert text == f"Error in python: {'x' * 4000}\nIts process crashed; it may have 256 MB of memory."


async def test_state_does_not_leak_between_calls(python: Python) -> None:
    """Neither names nor changed modules."""
    await run(python, "import math, builtins\nleaked = 1\nmath.pi = 3\nbuiltins.leaked = 2")
    [name, constant] = await run(python, "leaked", "import math\nmath.pi")
    assert "NameError" in name
    assert constant == "3.141592653589793"


async def test_episodes_share_a_forkserver_and_the_last_one_ends_it() -> None:
    """A worker has one warm interpreter, not one for each of its episodes."""
    before = {child.pid for child in psutil.Process().children()}

    def forkservers() -> set[int]:
        return {child.pid for child in psutil.Process().children()} - before

    first, second = Python(time_limit_s=2 * HANG_S), Python(time_limit_s=2 * HANG_S)
    assert await run(first, "1") == await run(second, "1") == ["1"]
    assert len(forkservers()) == 1
    await first.close()
    assert await run(second, "2") == ["2"]
    await second.close()
    assert forkservers() == set()
    assert Interpreter._shared.keys() == {key for key in Interpreter._shared if key[1].time_limit_s != 2 * HANG_S}


async def test_an_episode_that_never_calls_starts_nothing() -> None:
    """The forkserver starts with the first call."""
    before = len(psutil.Process().children())
    environment = Python(time_limit_s=9)
    await environment.step(turn(text="5"))
    assert len(psutil.Process().children()) == before
    await environment.close()


async def test_a_killed_forkserver_is_started_again() -> None:
    """The call that finds it gone does not notice."""
    before = {child.pid for child in psutil.Process().children()}
    environment = Python(time_limit_s=2 * HANG_S)
    assert await run(environment, "1") == ["1"]
    [forkserver] = [child for child in psutil.Process().children() if child.pid not in before]
    forkserver.kill()
    await until(lambda: not is_alive(forkserver.pid))
    assert await run(environment, "2") == ["2"]
    await environment.close()


async def test_a_call_that_is_cancelled_before_it_has_a_process_takes_nobody_elses() -> None:
    """The forkserver's late answer is for the call that is gone: taken for the next one's, the wrong process is killed
    and another one lives on."""
    before = {child.pid for child in psutil.Process().children()}
    environment = Python(time_limit_s=2 * HANG_S)
    assert await run(environment, "1") == ["1"]
    [forkserver] = [child for child in psutil.Process().children() if child.pid not in before]
    forkserver.suspend()
    call = asyncio.ensure_future(run(environment, "while True: pass"))
    await settled()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    forkserver.resume()
    assert await run(environment, "2") == ["2"]
    await until(lambda: not forkserver.children())
    await environment.close()


async def test_a_call_that_is_cancelled_ends_its_process() -> None:
    """The episode's deadline came."""
    before = {child.pid for child in psutil.Process().children()}
    environment = Python(time_limit_s=2 * HANG_S)
    assert await run(environment, "1") == ["1"]
    [forkserver] = [child for child in psutil.Process().children() if child.pid not in before]
    call = asyncio.ensure_future(run(environment, "while True: pass"))
    await until(forkserver.children)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await until(lambda: not forkserver.children())
    await environment.close()


async def test_where_processes_cannot_be_confined_no_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample fails with what a person can do; it is not told to the policy, whose code is not to blame. Here the
    processes take the machine for one that has no filter."""
    (tmp_path / "sitecustomize.py").write_text("import platform\nplatform.machine = lambda: 'abacus'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    environment = Python(time_limit_s=8)
    with pytest.raises(SetupError, match=r"there is no filter for abacus.*run where containers may use seccomp"):
        await run(environment, "1")
    await environment.close()


async def test_a_module_that_cannot_be_imported_is_named_with_the_remedy() -> None:
    """It says nothing about the machine."""
    environment = Python(modules=("math", "json.no_such_part"))
    with pytest.raises(SetupError, match=r"module json\.no_such_part .*ModuleNotFoundError.*or leave it out") as caught:
        await run(environment, "1")
    assert "seccomp" not in str(caught.value)
    await environment.close()


@pytest.mark.parametrize("name", ["time_limit_s", "memory_limit_mb", "max_characters"])
def test_settings_that_cannot_work_are_refused(name: str) -> None:
    """By name and value."""
    with pytest.raises(ValueError, match=f"{name} = 0 must be above 0"):
        Python(**{name: 0})
