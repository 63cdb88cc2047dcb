"""Lets the calls of a group share one prefill on each replica.

Calls that begin together would each compute the prompt, images included, because it is in the prefix cache only when
its prefill is over. Balancing brings a group's calls to the same replica; here all but the first wait, each in its
slot, for the first one's first token.

Invariants: no call waits for one that has a token, or that ended without one; all that waited begin together, so that a
replica that fails costs none of them more than it costs the first.
"""

import asyncio
from contextlib import suppress

from services.router.slots.slot import Slot


class SharedPrefill:
    """The prompts that replicas are computing for groups."""

    def __init__(self) -> None:
        """Start without calls."""
        self._computing: dict[tuple[str, int], asyncio.Event] = {}

    async def enter(self, slot: Slot, shared_prompt: int, *, timeout_s: float) -> None:
        """Return at once for the first call with this prompt on the slot's replica, for the others after its prefill.

        A cancelled wait releases the slot.

        Args:
            slot: The call's.
            shared_prompt: `Query.shared_prompt`; 0: nobody waits.
            timeout_s: Maximum seconds to wait.
        """
        if not shared_prompt:
            return
        key = slot.prompt_replica_id, shared_prompt
        computing = self._computing.get(key)
        if computing is None:
            self._computing[key] = is_over = asyncio.Event()

            def end() -> None:
                del self._computing[key]
                is_over.set()

            slot.call_when_begun(end)
            return
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await computing.wait()
        except asyncio.CancelledError:
            slot.release()
            raise
