"""The prefix cache's keys and the stamps of tokens, on records like the scheduler's; the rest is for real SGLang."""

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.utils.weight_versions import compute_weight_version_spans, record_weight_version_events

from services.rollout.engine.sglang_plugin import version_keys


def request(*, holds_kv: bool, num_tokens: int = 0, finished: bool = False) -> Any:
    """What the hooks look at."""
    return SimpleNamespace(
        kv=SimpleNamespace(holds_kv=holds_kv),
        extra_key=None,
        output_ids=list(range(num_tokens)),
        weight_version_events=[],
        finished=lambda: finished,
    )


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The version that SGLang serves."""
    state = SimpleNamespace(version="1")
    monkeypatch.setattr(version_keys, "_version", lambda: state.version)
    return state


def test_the_key_is_that_of_the_weights_that_compute_the_prompt(serving: SimpleNamespace) -> None:
    """Given when queued, changed while waiting, kept by one that holds KV, changed when it has lost it."""
    waiting, running = request(holds_kv=False), request(holds_kv=False)
    scheduler = SimpleNamespace(waiting_queue=[waiting])
    for one in (waiting, running):
        version_keys.key_by_version(scheduler, one)
        assert one.extra_key == "version=1"
    running.kv.holds_kv = True

    def record(_scheduler: Any, new_version: str) -> None:
        serving.version = new_version

    version_keys.note_version(record, scheduler, "2")
    assert (waiting.extra_key, running.extra_key) == ("version=2", "version=1")
    running.kv.holds_kv = False  # retracted for want of memory
    version_keys.key_by_version(scheduler, running, is_retracted=True)
    assert running.extra_key == "version=2"


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_a_token_under_way_is_the_old_weights(serving: SimpleNamespace, num_tokens: int) -> None:
    """With overlap a batch is computed before and its tokens are added after the version changes."""
    one, done = request(holds_kv=True, num_tokens=num_tokens), request(holds_kv=True, num_tokens=3, finished=True)
    batch = SimpleNamespace(reqs=[one, done])
    scheduler = SimpleNamespace(waiting_queue=[], result_queue=[(batch, None)])

    def record(_scheduler: Any, new_version: str) -> None:
        record_weight_version_events([one], old_version=serving.version)
        serving.version = new_version

    version_keys.note_version(record, scheduler, "2")
    spans = compute_weight_version_spans(
        one.weight_version_events, current_version="2", num_output_tokens=num_tokens + 3
    )
    assert [(span.version, span.start, span.end) for span in spans] == [
        ("1", 0, num_tokens + 1),
        ("2", num_tokens + 1, num_tokens + 3),
    ]
    assert done.weight_version_events == []


@pytest.mark.parametrize("mode", [version_keys.IN_PLACE, version_keys.RETRACT])
def test_a_pause_is_no_hang(mode: str) -> None:
    """SGLang's watchdog kills an engine whose batch stands still; a paused one has none, however long a push takes."""
    scheduler = SimpleNamespace(chunked_req=None, cur_batch_for_debug="a batch")
    version_keys.pause(lambda _scheduler, _request: None, scheduler, SimpleNamespace(mode=mode))
    assert scheduler.cur_batch_for_debug is None
