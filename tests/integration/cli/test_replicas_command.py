"""`penstock replicas`, run as a person would, at a real router."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.bus.connection import Bus
from penstock.clients import RouterClient
from penstock.config import SecurityConfig
from penstock.testing.simulated_engine import SimulatedEngine
from penstock.testing.simulated_pd_pair import SimulatedDecode, SimulatedPrefill
from services.cli import main
from services.router.config import RouterConfig
from services.router.server import routing
from tests.support.certificates import security_of
from tests.support.waiting import until

PENSTOCK = Path(sys.executable).parent / "penstock"


async def penstock(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(
        subprocess.run, [PENSTOCK, *arguments], capture_output=True, text=True, timeout=200, check=False
    )


async def test_lists_and_drains_replicas(steady_bus: Bus, tmp_path: Path) -> None:
    """A table, the same as JSON, by address or recipe; a drained replica is listed as draining, and a prefill
    replica with its role and why it has no partner."""
    async with (
        SimulatedPrefill(steady_bus, replica_id="x-prefill", tensor_parallel=2).running(),
        SimulatedDecode(steady_bus, replica_id="y-decode").running(),
        SimulatedEngine(steady_bus, replica_id="one", policy_version=3, max_running=4).running(),
        SimulatedEngine(steady_bus, replica_id="two", policy_version=3).running() as two,
        routing(RouterConfig(), steady_bus) as server,
    ):
        await two.update(num_running=2, kv_use=0.25)
        async with RouterClient(server.address) as client:

            async def is_known() -> bool:
                replicas = (await client.list_replicas()).replicas
                return [each.replica.num_running for each in replicas] == [0, 2, 0, 0]

            await until(is_known)
        listed = await penstock("replicas", "--address", server.address, "--json")
        assert listed.returncode == 0, listed.stderr
        pool = json.loads(listed.stdout)
        assert (pool["published_version"], pool["num_waiting"]) == (0, 0)
        first, second, prefill, decode = pool["replicas"]
        assert first == {
            "replica_id": "one",
            "address": first["address"],
            "role": "unified",
            "state": "ready",
            "policy_version": 3,
            "load": 0.0,
            "kv_use": 0.0,
            "num_running": 0,
            "num_queued": 0,
            "max_running": 4,
            "num_in_flight": 0,
            "limit": 4,
            "breaker": "closed",
            "routable": True,
            "reason": "",
        }
        assert (second["kv_use"], second["load"]) == (0.25, 0.25)
        assert [(each["role"], each["routable"]) for each in (prefill, decode)] == [
            ("prefill", False),
            ("decode", False),
        ]
        assert "without a partner that has the same tensor_parallel" in prefill["reason"]

        host, _, port = server.address.rpartition(":")
        recipe, ports = tmp_path / "recipe.toml", tmp_path / "ports.toml"
        recipe.write_text(f'[network]\nhost = "{host}"\n[router]\nport = 1\n')
        ports.write_text(f"[router]\nport = {port}\n")
        configs = ("--config", "tiny-cpu", "--config", recipe, "--config", ports)
        drained = await penstock("replicas", "drain", "one", *configs, "--grace-s", "1")
        assert drained.returncode == 0, drained.stderr
        assert drained.stdout.startswith("replica one is empty: 0 requests finished, 0 handed over")
        table = await penstock("replicas", *configs)
        assert table.returncode == 0, table.stderr
        row = next(line for line in table.stdout.splitlines() if line.startswith("one "))
        assert "no: draining" in row
        row = next(line for line in table.stdout.splitlines() if line.startswith("two "))
        assert "25%" in row
        assert "yes" in row


async def test_says_which_replicas_there_are(steady_bus: Bus) -> None:
    """A mistyped id is one line with those that exist."""
    async with SimulatedEngine(steady_bus, replica_id="one").running(), routing(RouterConfig(), steady_bus) as server:
        failed = await penstock("replicas", "drain", "oen", "--address", server.address)
        assert failed.returncode != 0
        [line] = failed.stderr.splitlines()
        assert "'oen': no replica of this id holds a lease; there are: one" in line


async def test_mistakes_are_one_line(tmp_path: Path) -> None:
    """No address, two of them, options before the command's name, nobody there."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[router]\nport = 5\n")
    for arguments, words in (
        ((), "--address"),
        (("--address", "127.0.0.1:1", "--config", str(recipe)), "leave out one"),
        (("--json", "drain", "x"), "come after its name"),
        (("drain",), "ID"),
    ):
        failed = await penstock("replicas", *arguments)
        assert failed.returncode == 2, failed
        [line] = failed.stderr.splitlines()
        assert line.startswith("error: ")
        assert words in line
    failed = await penstock("replicas", "--address", "127.0.0.1:1")
    assert failed.returncode == 1
    assert "router at 127.0.0.1:1" in failed.stderr


async def test_a_router_with_tls_is_reached_by_its_address(steady_bus: Bus, certificates: SecurityConfig) -> None:
    """With settings of [security] beside it, before and after the name of a command; without, the error says how."""
    security = security_of(certificates)
    async with (
        SimulatedEngine(steady_bus, replica_id="one", security=security).running(),
        routing(RouterConfig(), steady_bus, security=security) as server,
    ):
        reach = ("--address", server.address, f"--security.tls_ca={certificates.tls_ca}")
        listed = await penstock("replicas", *reach, "--json")
        assert (listed.returncode, listed.stderr) == (0, "")
        drained = await penstock("replicas", "drain", "one", *reach)
        assert (drained.returncode, drained.stderr) == (0, "")
        without = await penstock("replicas", *reach[:2])
        assert without.returncode == 1
        assert "if it asks for TLS" in without.stderr


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("--router.port=7", "names a router with settings of its own; leave out --router.port=7"),
        ("--security.tls_c=ca.pem", "unknown key security.tls_c; did you mean security.tls_ca?"),
        ("--security.tls_ca=nowhere.pem", "security.tls_ca = 'nowhere.pem' cannot be read"),
    ],
)
def test_overrides_are_checked_before_the_router_is_asked(
    override: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is one line that names the setting."""
    assert main(["replicas", "--address", "127.0.0.1:1", override]) == 2
    assert error in capsys.readouterr().err
