"""Each client's ordinary examples, in a process of the environment that has it, against a router.

`tests/clients/examples/<client>.py URL MODEL` prints one JSON object: what each of its examples got. A client that is
not installed is skipped. Not collected by default: `make test-clients`.
"""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.clients.scripted_policy import ScriptedPolicy
from tests.support.router.openai_harness import Harness

EXAMPLES = Path(__file__).parent / "examples"
ENVIRONMENTS = Path(os.environ.get("PENSTOCK_TEST_CLIENTS", ".clients"))
OWN_ENVIRONMENTS = {"inspect_client": "inspect"}
"""Clients that need another version of openai than the others."""
_NOT_INSTALLED = 77
_EXPECTED: dict[str, Any] = {
    "chat": "It is 5",
    "stream": "It is 5",
    "options": "It is 5",
    "tools": "It is 5",
    "structured": {"a": 2, "b": 3},
    "required": {"a": 2, "b": 3},
    "json": {"a": 2, "b": 3},
    "history": "It is 5",
    "image": "It is 5",
}


@pytest.mark.parametrize("client", sorted(path.stem for path in EXAMPLES.glob("*.py")))
async def test_examples_run_unchanged(harness: Harness, client: str) -> None:
    """Every one of them gets what the policy said, in the client's own form."""
    for engine in harness.engines:
        engine.answer = ScriptedPolicy(harness.renderer)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ.get("HOME", "/"),
        "OPENAI_API_KEY": "none",
        "PYTHONPATH": str(EXAMPLES.parent / "shared"),
    }
    process = await asyncio.create_subprocess_exec(
        str(ENVIRONMENTS / OWN_ENVIRONMENTS.get(client, "common") / "bin/python"),
        str(EXAMPLES / f"{client}.py"),
        f"{harness.routers[0].url}/v1",
        harness.run,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )
    output, errors = await process.communicate()
    if process.returncode == _NOT_INSTALLED:
        pytest.skip(f"{client} is not installed: {errors.decode().strip()[-200:]}")
    assert process.returncode == 0, errors.decode()[-4000:]
    got = json.loads(output.decode().strip().splitlines()[-1])
    assert got == {name: _EXPECTED[name] for name in got}
    assert len(got) >= 2
