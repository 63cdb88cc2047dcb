"""The trainer's end of a weight group: rank 0 of a torch.distributed group whose other members are SGLang engines.

The rendezvous is the one of SGLang's `init_custom_process_group`, so no SGLang is needed here. With gloo `form` proves
that all members are there, and no call waits longer than its timeout. `close` ends a rendezvous at once, also for the
members; a broadcast cannot be interrupted, so the members are let go when it ends: at its timeout, or when the member
for which it waits leaves. After an error the group is of no use; close it and open another under a new name.

With NCCL members connect at their first broadcast, so `form` proves nothing about them, and one that is missing is
noticed in the transfer. Whether `close` or the timeout ends a broadcast that still connects has not been tried.
"""

import collections
import datetime
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Self

import structlog
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from penstock.errors import DeadlineError, SetupError, UnavailableError

log = structlog.get_logger()

_LISTEN_TIMEOUT_S = 5.0
_KNOCK_S = 1.0
_POLL_S = 0.002
_SHORT_POLL_S = 0.0001
_LONG_POLL_S = 0.002
"""How often to look whether a part has gone: often at first, for between GPUs it takes no longer; then rarely, for
between CPUs the looking takes time from the sending."""
_AHEAD = 4
"""Parts that are under way at a time."""
_ARRIVALS_KEY = "init/"
"""Where torch's TCPStore counts the members that have connected."""


class WeightGroup:
    """A group of one trainer and its engines. All methods block; call them with `asyncio.to_thread`."""

    def __init__(self, server: Any, store: Any, *, name: str, world_size: int, backend: str) -> None:
        """Use `listen`."""
        self.name = name
        self.port: int = server.port
        """Where the members find the rendezvous."""
        self._world_size = world_size
        self._backend = backend
        self._server = server  # the rendezvous ends when this is let go
        self._store = store
        self._group: Any = None
        self._closed = False
        self._lock = threading.Lock()

    @classmethod
    def listen(cls, *, host: str, name: str, world_size: int, backend: str) -> Self:
        """Open the rendezvous, on any port that is free.

        Args:
            host: Address of this machine under which the members reach it.
            name: Unique name of the group.
            world_size: Members, this one included.
            backend: "gloo" or "nccl".

        Raises:
            SetupError: this machine cannot be reached there.
        """
        timeout = datetime.timedelta(seconds=_LISTEN_TIMEOUT_S)
        try:
            server = dist.TCPStore(host, 0, None, is_master=True, timeout=timeout, wait_for_workers=False)
            store = dist.TCPStore(host, server.port, None, is_master=False, timeout=timeout, wait_for_workers=False)
        except RuntimeError as error:
            raise SetupError(
                f"cannot listen on {host} for the weight group: {_first_line(error)}; choose another push.host"
            ) from None
        return cls(server, store, name=name, world_size=world_size, backend=backend)

    def form(self, *, timeout_s: float) -> None:
        """Wait for the members, with gloo; with NCCL only this side gets ready.

        Raises:
            DeadlineError: not all came within `timeout_s`.
            UnavailableError: the group was closed, or a member went away while it formed.
        """
        timeout = datetime.timedelta(seconds=timeout_s)
        deadline = time.monotonic() + timeout_s
        store = self._store
        if store is None:
            raise UnavailableError(f"weight group {self.name} is closed; open another")
        try:
            store.set_timeout(timeout)
            group = _new_group(
                dist.PrefixStore(self.name, store),
                world_size=self._world_size,
                name=self.name,
                backend=self._backend,
                timeout=timeout,
            )
        except RuntimeError as error:
            if self.is_closed:
                raise UnavailableError(f"weight group {self.name} was closed while it formed") from None
            kind = DeadlineError if time.monotonic() >= deadline else UnavailableError
            raise kind(
                f"weight group {self.name}: not all {self._world_size} members came within {timeout_s:g} s: "
                f"{_first_line(error)}"
            ) from None
        with self._lock:
            if not self._closed:
                self._group = group
                return
        _leave(group)
        raise UnavailableError(f"weight group {self.name} was closed while it formed")

    def broadcast(self, parts: Iterable[torch.Tensor], *, timeout_s: float) -> None:
        """Send buckets or parts of them, uint8[bytes] each, to all members; back when this side is done with them.

        Several are under way at a time, so that no member waits for the next while it looks at the last.

        Raises:
            DeadlineError: it took longer than `timeout_s`.
            UnavailableError: a member is gone, or the group was closed.
        """
        deadline = time.monotonic() + timeout_s
        under_way: collections.deque[Any] = collections.deque()
        try:
            for part in parts:
                under_way.append(self._start(part.to(self._device), deadline))
                if len(under_way) > _AHEAD:
                    self._await(under_way.popleft(), deadline)
            while under_way:
                self._await(under_way.popleft(), deadline)
        except RuntimeError as error:
            raise UnavailableError(f"weight group {self.name}: broadcast failed: {_first_line(error)}") from None
        finally:
            # The members hear that this side has left when nothing refers to the group, a traceback's frame included.
            under_way.clear()

    def _start(self, part: torch.Tensor, deadline: float) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = datetime.timedelta(seconds=max(deadline - time.monotonic(), 0.001))
        options.asyncOp = True
        group = self._group
        if group is None:
            raise UnavailableError(f"weight group {self.name} is closed; open another")
        try:
            return group.broadcast([part], options)
        finally:
            group = None

    def _await(self, work: Any, deadline: float) -> None:
        poll_s = _SHORT_POLL_S
        try:
            while not work.is_completed():
                if self.is_closed:
                    raise UnavailableError(f"weight group {self.name} was closed during a broadcast")
                if time.monotonic() > deadline:
                    raise DeadlineError(f"weight group {self.name}: the transfer takes too long; a member hangs")
                time.sleep(poll_s)
                poll_s = min(2 * poll_s, _LONG_POLL_S)
            work.wait()
        finally:
            work = None

    def close(self, *, num_coming: int = 0) -> None:
        """Leave the group, formed or not; a call that runs in another thread ends with an error. May be repeated.

        It may wait for a broadcast that runs, see above.

        Args:
            num_coming: Members that are on their way to the rendezvous. They are awaited for a moment, to be sent away:
                one that finds nobody there would knock for as long as it has time.
        """
        self._await_members(num_coming)
        with self._lock:
            if self._closed:
                return
            self._closed = True
            group, self._group = self._group, None
            self._server = self._store = None
        if group is not None:
            _leave(group)
        log.debug("weight_group.closed", group=self.name)

    def _await_members(self, num_coming: int) -> None:
        give_up_at = time.monotonic() + _KNOCK_S
        while time.monotonic() < give_up_at:
            server = self._server
            if server is None or self._group is not None or server.add(_ARRIVALS_KEY, 0) >= num_coming:
                return
            time.sleep(_POLL_S)

    @property
    def is_closed(self) -> bool:
        """Whether it is of no use any more."""
        return self._closed

    @property
    def _device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device()) if self._backend == "nccl" else torch.device("cpu")


def _new_group(store: Any, *, world_size: int, name: str, backend: str, timeout: datetime.timedelta) -> Any:
    """What SGLang's members do on their side, after torch's own `init_process_group`."""
    group, _ = distributed_c10d._new_process_group_helper(
        world_size, 0, [], dist.Backend(backend), store, group_name=name, backend_options=None, timeout=timeout
    )
    distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group


def _leave(group: Any) -> None:
    with suppress(RuntimeError):
        group.abort()
    with suppress(RuntimeError, ValueError):
        dist.destroy_process_group(group)


def _first_line(error: Exception) -> str:
    """Without torch's C++ stack."""
    return str(error).split("\n", 1)[0]
