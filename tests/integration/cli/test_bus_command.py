"""`penstock bus`, run as a person would, on a real nats-server."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import msgpack
import pytest

from penstock.bus.connection import Bus, connect
from penstock.bus.local_server import local_server
from penstock.bus.sessions import Sessions
from penstock.bus.work_queue.consumer import consuming
from penstock.config import BusConfig, SecurityConfig
from services.cli import main
from tests.support.certificates import security_of

PENSTOCK = Path(sys.executable).parent / "penstock"


async def penstock_bus(bus: Bus, run: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `penstock bus` on the run's streams."""
    command = [PENSTOCK, "bus", *arguments, "--url", bus.config.url, "--run", run]
    return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=200, check=False)


async def test_lists_the_streams_with_what_waits_in_them(bus: Bus, run_name: str) -> None:
    """Messages, bytes, age, and what the consumer has in hand or has been given again."""
    await bus.publish(bus.prompts, b"x" * 1000, message_id="a")
    async with consuming(bus, bus.prompts, "workers", ack_wait_s=30.0, max_ack_pending=10) as consumer:
        [first] = await consumer.fetch(1)
        await first.put_back()
        while not await consumer.fetch(1):
            continue  # the server gives it again when it has come to that
        for name in "bc":
            await bus.publish(bus.prompts, b"x" * 1000, message_id=name)
        await consumer.fetch(1)
        listed = await penstock_bus(bus, run_name, "--json")
        table = await penstock_bus(bus, run_name)
    assert listed.returncode == 0, listed.stderr
    prompts, groups, dead = json.loads(listed.stdout)
    assert (prompts["name"], prompts["num_messages"]) == (f"{run_name}_PROMPTS", 3)
    assert prompts["size_bytes"] > 3000
    assert prompts["oldest_age_s"] >= 0
    assert prompts["consumers"] == [{"name": "workers", "num_pending": 1, "num_in_hand": 2, "num_redelivered": 1}]
    assert (groups["num_messages"], groups["oldest_age_s"], dead["consumers"]) == (0, None, [])
    assert f"{run_name}_PROMPTS" in table.stdout


async def test_shows_a_dead_letter_of_any_version_and_puts_it_back(bus: Bus, run_name: str) -> None:
    """A record that no present reader knows is shown in full, and its message comes again, byte for byte."""
    payload = msgpack.packb({"version": 99, "ids": ["<i4", [3], bytes(12)], "image": bytes(5000), "text": "é" * 500})
    await bus.publish(bus.prompts, payload, message_id="run/7/0/a")
    async with consuming(bus, bus.prompts, "workers", ack_wait_s=30.0, max_ack_pending=10) as consumer:
        [delivery] = await consumer.fetch(1)
        await delivery.bury("CorruptMessageError: no\nPrompt")
        listed = await penstock_bus(bus, run_name, "letters")
        assert listed.stdout.startswith("1  run/7/0/a  ")
        assert listed.stdout.endswith("ago  CorruptMessageError: no Prompt\n")
        shown = json.loads((await penstock_bus(bus, run_name, "show", "1")).stdout)
        assert (shown["message_id"], shown["subject"]) == ("run/7/0/a", bus.prompts.subject)
        assert shown["payload"]["version"] == 99
        assert shown["payload"]["ids"] == "<array <i4 [3]>"
        assert shown["payload"]["image"] == "<5000 bytes>"
        assert shown["payload"]["text"].endswith("... (500 characters)")
        requeued = await penstock_bus(bus, run_name, "requeue", "1")
        assert requeued.returncode == 0, requeued.stderr
        [again] = await consumer.fetch(1)
        assert again.payload == payload
        assert (await penstock_bus(bus, run_name, "letters")).stdout == ""


async def test_recipes_lie_over_one_another(bus: Bus, run_name: str, tmp_path: Path) -> None:
    """One that comes with Penstock by its name; a later one keeps what it does not name."""
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    first.write_text(f'[bus]\nurl = "{bus.config.url}"\n[run]\nname = "another"\n')
    second.write_text(f'[run]\nname = "{run_name}"\n')
    command = [PENSTOCK, "bus", "letters", "--config", "tiny-cpu", "--config", first, "--config", second]
    found = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=200, check=False)
    assert (found.returncode, found.stderr) == (0, "")


async def test_a_policy_that_is_only_served_has_streams_and_no_letters(bus: Bus, run_name: str) -> None:
    """A router by itself keeps the calls of sessions, and no queue that could have dead letters."""
    served = f"{run_name}-served"
    async with connect(bus.config, run=served) as router:
        await Sessions(router).ensure()
        listed = await penstock_bus(bus, served, "--json")
        letters = await penstock_bus(bus, served, "letters")
        await router.delete_run()
    assert listed.returncode == 0, listed.stderr
    assert [stream["name"] for stream in json.loads(listed.stdout)] == [f"{served}_SESSIONS"]
    assert (letters.returncode, letters.stdout) == (0, ""), letters.stderr


async def test_mistakes_are_one_line_with_the_remedy(bus: Bus, run_name: str) -> None:
    """A letter that is not there, and a command that does not know which bus is meant."""
    missing = await penstock_bus(bus, run_name, "show", "17")
    assert missing.returncode != 0
    assert missing.stderr == "error: there is no dead letter 17; `penstock bus letters` lists them\n"
    unknown = await penstock_bus(bus, "another")
    assert unknown.returncode == 2
    assert unknown.stderr.startswith(f"error: run 'another' has no streams on NATS at {bus.config.url}; ")
    nowhere = await asyncio.to_thread(
        subprocess.run, [PENSTOCK, "bus"], capture_output=True, text=True, timeout=200, check=False
    )
    assert nowhere.returncode == 2
    assert "give --url nats://HOST:PORT and --run NAME" in nowhere.stderr


@pytest.mark.parametrize(
    ("payload", "shown"),
    [
        pytest.param(b"\xc1 garbage", "9 bytes that are not msgpack: ", id="no msgpack"),
        pytest.param(b"\x81\x90\x00", "3 bytes that are not msgpack: ", id="a list as a key"),
        pytest.param(b"\xd6\xff" + bytes(4), "Timestamp(", id="a time"),
        pytest.param(b"\x91" * 1000 + b"\x00", "1001 bytes of msgpack that is nested too deep: ", id="a deep list"),
    ],
)
async def test_bytes_that_are_no_record_are_shown_as_such(bus: Bus, run_name: str, payload: bytes, shown: str) -> None:
    """Anything may be on a queue."""
    await bus.publish(bus.prompts, payload, message_id="a")
    async with consuming(bus, bus.prompts, "workers", ack_wait_s=30.0, max_ack_pending=10) as consumer:
        [delivery] = await consumer.fetch(1)
        await delivery.bury("no record")
    letter = json.loads((await penstock_bus(bus, run_name, "show", "1")).stdout)
    assert letter["payload"].startswith(shown)


@pytest.mark.slow
async def test_a_nats_with_tls_is_reached_by_its_address(
    tmp_path: Path, certificates: SecurityConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With settings of [security] beside --url; the same for `penstock runs`, which also deletes there."""
    monkeypatch.delenv("PENSTOCK_NATS_TOKEN", raising=False)
    security, reach = security_of(certificates), f"--security.tls_ca={certificates.tls_ca}"
    async with local_server(tmp_path, security=security) as url:
        async with connect(BusConfig(url=url), run="secured", security=security) as bus:
            await bus.ensure_streams()
            await bus.publish(bus.dead, b"x", message_id="a")
            for command in ((), ("letters",), ("show", "1")):
                found = await penstock_bus(bus, "secured", *command, reach)
                assert found.returncode == 0, found.stderr
            without = await penstock_bus(bus, "secured", "letters")
            assert without.returncode != 0

        async def runs(*arguments: str) -> subprocess.CompletedProcess[str]:
            command = [PENSTOCK, "runs", *arguments, "--url", url]
            return await asyncio.to_thread(
                subprocess.run, command, capture_output=True, text=True, timeout=200, check=False, cwd=tmp_path
            )

        listed = await runs("list", "--json", reach)
        assert [row["run"] for row in json.loads(listed.stdout)] == ["secured"], listed.stderr
        deleted = await runs("delete", "secured", "--yes", reach)
        assert deleted.returncode == 0, deleted.stderr
        assert json.loads((await runs("list", "--json", reach)).stdout) == []


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("bus", "--url=nats://127.0.0.1:1", "--security.tls_c=ca.pem"), "did you mean security.tls_ca?"),
        (
            ("bus", "letters", "--url=nats://127.0.0.1:1", "--security.tls_ca=no.pem"),
            "tls_ca = 'no.pem' cannot be read",
        ),
        (("bus", "--url=nats://127.0.0.1:abc"), "its port is not a number from 1 to 65535"),
        (("runs", "list", "--url=nats://127.0.0.1:abc"), "its port is not a number from 1 to 65535"),
        (("runs", "delete", "x", "--url=http://127.0.0.1:1"), "its scheme is neither nats nor tls"),
        (("runs", "list", "--security.tls_ca=ca.pem"), "give --url NATS_URL"),
        (
            ("runs", "delete", "x", "--url=nats://127.0.0.1:1", "--bus.replicas=3"),
            "--bus.replicas=3: runs have recipes",
        ),
    ],
)
def test_overrides_are_checked_before_nats_is_asked(
    arguments: tuple[str, ...], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is one line that names the setting."""
    assert main([*arguments]) == 2
    assert error in capsys.readouterr().err
