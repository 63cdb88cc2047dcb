"""Calls the reward service for a thread that may block; an event loop in another thread enforces the deadlines."""

import asyncio
import concurrent.futures
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from threading import Thread
from traceback import print_exception
from types import TracebackType
from typing import Self

from penstock.clients import RewardClient
from penstock.errors import DeadlineError, InvalidRequestError, PenstockError, SetupError, UnavailableError
from penstock.runtime.process import report_error
from penstock.v1 import reward_pb2

_PATIENCE_S = 3600.0
"""Limit of a batch in seconds, including the time in which the service is overloaded or restarts."""

END_S = 30.0
"""Seconds in which the service must end; its servers give running calls 5."""

Service = Callable[[], contextlib.AbstractAsyncContextManager[RewardClient]]
"""Opens a client, and starts its service if needed; both end with the context."""

Verdicts = concurrent.futures.Future[list[reward_pb2.Verdict]]


class RewardCaller:
    """Calls `service` from an event loop in its own thread; use it as a context manager."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._ready: concurrent.futures.Future[RewardClient] = concurrent.futures.Future()
        self._thread = Thread(target=self._run, name="reward-caller", daemon=True)

    def __enter__(self) -> Self:
        """Wait until the service answers.

        Raises:
            SetupError: the service does not start.
        """
        self._thread.start()
        self._client = self._ready.result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Cancel running calls, and end the service if it was started here.

        If that takes longer than `END_S`, this process exits at once, and the service's processes with it: Python would
        wait for threads on its way out.
        """
        self._loop.call_soon_threadsafe(self._leave.set)
        self._thread.join(END_S)
        if self._thread.is_alive():
            if error is not None and not isinstance(error, PenstockError):
                print_exception(error)
            stuck = PenstockError(f"the reward service did not end within {END_S:g} s")
            os._exit(report_error(error if isinstance(error, PenstockError) else stuck))

    def known_profiles(self) -> set[str]:
        """Return the names of the service's profiles.

        Raises:
            SetupError: no service answers.
        """
        pending = asyncio.run_coroutine_threadsafe(self._client.list_profiles(), self._loop)
        try:
            return {profile.name for profile in pending.result()}
        except (UnavailableError, DeadlineError) as error:
            raise SetupError(f"{error}; start a reward service there, or leave out --address") from None

    def verify(self, items: Sequence[reward_pb2.VerifyItem]) -> Verdicts:
        """Verify `items`; the verdicts are in the same order."""
        return asyncio.run_coroutine_threadsafe(self._verify(items), self._loop)

    async def _verify(self, items: Sequence[reward_pb2.VerifyItem]) -> list[reward_pb2.Verdict]:
        if not items:
            return []
        try:
            return await self._client.verify_batch(
                items, timeout_s=_PATIENCE_S, retry_until=time.monotonic() + _PATIENCE_S
            )
        except InvalidRequestError:
            if len(items) == 1:
                raise
            middle = len(items) // 2  # another user's service may have a queue shorter than this batch
            return [*await self._verify(items[:middle]), *await self._verify(items[middle:])]

    def _run(self) -> None:
        try:
            asyncio.run(self._live())
        except BaseException as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)

    async def _live(self) -> None:
        self._loop, self._leave = asyncio.get_running_loop(), asyncio.Event()
        async with self._service() as client:
            self._ready.set_result(client)
            await self._leave.wait()
