"""Keys the prefix cache by policy version, and stamps versions exactly to the token. Runs inside SGLang's scheduler.

Invariant: a request without KV finds only prefixes that were computed from the current weights. SGLang's own cache does
not know versions: after an update without a flush, it would serve prefixes of older weights.

A request gets the version's key when it is queued, new or retracted, and again when the version changes while it waits.
A request that holds KV keeps its key to the end, so no later request finds what it leaves in the cache.
"""

from collections.abc import Callable
from typing import Any

IN_PLACE, RETRACT = "in_place", "retract"


def key_by_version(_scheduler: Any, req: Any, *_args: Any, **_kwargs: Any) -> None:
    """Hook before a request is queued."""
    _set_key(req, _version())


def note_version(record: Callable[..., None], scheduler: Any, new_version: str | None) -> None:
    """Hook around a change of the version, which happens while nothing runs."""
    old_version = _version()
    record(scheduler, new_version)
    if new_version is None or new_version == old_version:
        return
    for req in scheduler.waiting_queue:
        _set_key(req, new_version)
    # With overlap, the last batch was computed by the old weights, but its tokens are not added yet.
    for batch, _ in getattr(scheduler, "result_queue", ()):
        for req in batch.reqs:
            if not req.finished():
                stamp_token_under_way(req, old_version)


def pause(original: Callable[..., None], scheduler: Any, request: Any) -> None:
    """Hook around a pause: pause in place only if every running request has computed its prompt.

    Otherwise new weights would finish a prompt that old ones began, and no span would show it.
    """
    if request.mode == IN_PLACE and scheduler.chunked_req is not None:
        request = type(request)(mode=RETRACT)
    original(scheduler, request)
    scheduler.cur_batch_for_debug = None  # with a batch, SGLang's watchdog takes a long pause for a hang
    if request.mode == IN_PLACE and getattr(scheduler, "result_queue", ()):
        scheduler.forward_stream.synchronize()  # finish what was launched before weights change


def stamp_token_under_way(req: Any, old_version: str) -> None:
    """Count the token that is computed but not yet added as a token of `old_version`."""
    from sglang.srt.utils.weight_versions import WeightVersionEvent

    events, num_tokens = req.weight_version_events, len(req.output_ids)
    if events and (events[-1].old_version, events[-1].num_output_tokens) == (old_version, num_tokens):
        events.pop()
    events.append(WeightVersionEvent(old_version=old_version, num_output_tokens=num_tokens + 1))


def _set_key(req: Any, version: str) -> None:
    if not req.kv.holds_kv:
        req.extra_key = f"version={version}"


def _version() -> str:
    from sglang.srt.runtime_context import get_serving

    return str(get_serving().weight_version)
