"""Dead letters wait for a person, but not without end."""

import pytest

from penstock.bus import connection
from penstock.bus.connection import Bus
from penstock.bus.stored.dead_letters import letter_headers, list_letters
from penstock.config import BusConfig


async def test_letters_are_kept_for_thirty_days_and_two_gibibytes(bus: Bus) -> None:
    """The server holds the bounds; the queues have none, for nothing may be dropped from them."""
    dead = (await bus.jetstream.stream_info(bus.dead.name)).config
    assert (dead.max_age, dead.max_bytes) == (30 * 24 * 3600, 2 * 2**30)
    for queue in (bus.prompts, bus.groups):
        config = (await bus.jetstream.stream_info(queue.name)).config
        assert config.max_age in (None, 0)
        assert config.max_bytes in (None, -1)


async def test_the_oldest_letters_make_room(
    bus: Bus, bus_config: BusConfig, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full stream refuses no letter: the run that buries goes on."""
    monkeypatch.setattr(connection, "_DEAD_LETTER_BYTES", 50_000)
    small = Bus(bus.client, bus_config, f"{run_name}-small")
    try:
        await small.ensure_streams()
        for number in range(10):
            headers = letter_headers(reason="broken", subject=small.groups.subject, message_id=f"run/{number}/0/a")
            await small.publish(small.dead, bytes(10_000), message_id=f"dead/{number}", headers=headers)
        letters = await list_letters(small)
        assert [letter.message_id for letter in letters] == [f"run/{number}/0/a" for number in range(6, 10)]
    finally:
        await small.delete_run()
