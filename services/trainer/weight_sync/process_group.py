"""The trainer's end of a torch.distributed process group whose other members are SGLang engines; its rank is 0.

The rendezvous is that of SGLang's `init_custom_process_group`, but SGLang is not needed here. With gloo, `form` proves
that all members are present, and no call outlasts its timeout. `close` ends a rendezvous at once, also for the members.
A broadcast cannot be interrupted: its members are released when it ends, at its timeout or when the member it waits for
leaves. After an error the group is unusable; close it and open another under a new name.

With NCCL, members connect in their first broadcast, so `form` proves nothing and a missing member is noticed in the
transfer. Connecting ends at a timeout of its own (`penstock.weights.nccl`), which was seen on a GPU. There, NCCL took
longer than `close` waits to take apart a group whose member died in the midst of a transfer.
"""

import collections
import datetime
import threading
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Self

import structlog
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from penstock.errors import DeadlineError, SetupError, UnavailableError
from penstock.weights import nccl

log = structlog.get_logger()

_LISTEN_TIMEOUT_S = 5.0
_LISTEN_TRIES = 2
"""A process that was stopped during the first, or whose machine was, has not shown that its address is wrong."""
_ARRIVAL_GRACE_S = 1.0
_LEAVE_S = 5.0
"""The longest that `close` waits until torch has taken the group apart."""
_POLL_S = 0.002
_SHORT_POLL_S = 0.0001
_LONG_POLL_S = 0.002
"""Poll a send fast at first (GPU sends finish quickly), then slowly (on CPUs polling competes with sending)."""
_AHEAD = 4
"""Most parts in flight at a time."""


class WeightProcessGroup:
    """A process group of one trainer and its engines. All methods block; call them with `asyncio.to_thread`."""

    def __init__(self, server: Any, store: Any, *, name: str, world_size: int, backend: str) -> None:
        """Use `listen`."""
        self.name = name
        self.port: int = server.port
        """Port of the rendezvous."""
        self._world_size = world_size
        self._backend = backend
        self._server = server  # the rendezvous ends when this is released
        self._store = store
        self._group: Any = None
        self._closed = False
        self._lock = threading.Lock()

    @classmethod
    def listen(cls, *, host: str, name: str, world_size: int, backend: str) -> Self:
        """Open the rendezvous on a free port.

        Args:
            host: Address of this machine that the members can reach.
            name: Unique name of the process group.
            world_size: Number of members, including the trainer.
            backend: "gloo" or "nccl".

        Raises:
            SetupError: `host` is not an address of this machine.
        """
        timeout = datetime.timedelta(seconds=_LISTEN_TIMEOUT_S)
        for tries_left in reversed(range(_LISTEN_TRIES)):
            try:
                server = dist.TCPStore(host, 0, None, is_master=True, timeout=timeout, wait_for_workers=False)
                store = dist.TCPStore(host, server.port, None, is_master=False, timeout=timeout, wait_for_workers=False)
                break
            except RuntimeError as error:
                if not tries_left:
                    raise SetupError(
                        f"network.advertise_host = {host!r}: cannot listen there for the process group of a push: "
                        f"{_first_line(error)}; set it to a name or address of this machine"
                    ) from None
        return cls(server, store, name=name, world_size=world_size, backend=backend)

    def form(self, *, timeout_s: float) -> None:
        """Wait for the members with gloo; with NCCL, prepare only this side.

        Raises:
            DeadlineError: a member did not join within `timeout_s`.
            UnavailableError: the group was closed, or a member left while it formed.
        """
        timeout = datetime.timedelta(seconds=timeout_s)
        deadline = time.monotonic() + timeout_s
        store = self._store
        if store is None:
            raise UnavailableError(f"process group {self.name} is closed; open another")
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
                raise UnavailableError(f"process group {self.name} was closed while it formed") from None
            kind = DeadlineError if time.monotonic() >= deadline else UnavailableError
            raise kind(
                f"process group {self.name}: not all {self._world_size} members joined within {timeout_s:g} s: "
                f"{_first_line(error)}"
            ) from None
        with self._lock:
            if not self._closed:
                self._group = group
                return
        _leave(group)
        raise UnavailableError(f"process group {self.name} was closed while it formed")

    def broadcast(self, parts: Iterable[torch.Tensor], *, timeout_s: float) -> None:
        """Send `parts`, uint8[bytes] each, to all members; return when this side has sent them.

        Several parts are in flight at a time, so that members do not wait while they process one.

        Raises:
            DeadlineError: it took longer than `timeout_s`.
            UnavailableError: a member left, or the group was closed.
        """
        deadline = time.monotonic() + timeout_s
        in_flight: collections.deque[Any] = collections.deque()
        try:
            with self._own_stream():
                for part in parts:
                    in_flight.append(self._start(part.to(self._device), deadline))
                    if len(in_flight) > _AHEAD:
                        self._await(in_flight.popleft(), deadline)
                while in_flight:
                    self._await(in_flight.popleft(), deadline)
        except RuntimeError as error:
            raise UnavailableError(f"process group {self.name}: broadcast failed: {_first_line(error)}") from None
        finally:
            # Members notice that this side left only when nothing refers to the group, including a traceback's frame.
            in_flight.clear()

    def _start(self, part: torch.Tensor, deadline: float) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = datetime.timedelta(seconds=max(deadline - time.monotonic(), 0.001))
        options.asyncOp = True
        group = self._group
        if group is None:
            raise UnavailableError(f"process group {self.name} is closed; open another")
        try:
            return group.broadcast([part], options)
        finally:
            group = None

    def _await(self, work: Any, deadline: float) -> None:
        poll_s = _SHORT_POLL_S
        try:
            while not work.is_completed():
                if self.is_closed:
                    raise UnavailableError(f"process group {self.name} was closed during a broadcast")
                if time.monotonic() > deadline:
                    raise DeadlineError(f"process group {self.name}: the transfer took too long; a member hangs")
                time.sleep(poll_s)
                poll_s = min(2 * poll_s, _LONG_POLL_S)
            work.wait()
        finally:
            work = None

    def close(self, *, are_coming: bool = False) -> None:
        """Leave the group, formed or not; a call in another thread ends with an error. May be called repeatedly.

        It may wait for a running broadcast, see above; after a few seconds a thread goes on with it.

        Args:
            are_coming: Whether members are about to reach the rendezvous. If so, it stays open for a moment longer to
                reject them: a member that finds no rendezvous would retry until its own timeout.
        """
        if are_coming:
            self._await_members()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            group, self._group = self._group, None
            self._server = self._store = None
        leaving = threading.Thread(target=_leave, args=(group,), name=f"leave {self.name}", daemon=True)
        del group  # members notice that this side left only when nothing refers to it
        leaving.start()
        leaving.join(_LEAVE_S)
        if leaving.is_alive():
            log.warning("process_group.still_leaving", process_group=self.name, waited_s=_LEAVE_S)
        else:
            log.debug("process_group.closed", process_group=self.name)

    def _await_members(self) -> None:
        give_up_at = time.monotonic() + _ARRIVAL_GRACE_S
        while time.monotonic() < give_up_at and not self._closed and self._group is None:
            time.sleep(_POLL_S)

    def _own_stream(self) -> AbstractContextManager[object]:
        """Return a separate stream on a GPU, so that copies from the host do not wait for training's queued work."""
        if self._device.type == "cpu":
            return nullcontext()
        own: AbstractContextManager[object] = torch.cuda.stream(torch.cuda.Stream(self._device))
        return own

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def _device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device()) if self._backend == "nccl" else torch.device("cpu")


def _new_group(store: Any, *, world_size: int, name: str, backend: str, timeout: datetime.timedelta) -> Any:
    """Form the group as SGLang's members do; they follow torch's own `init_process_group`."""
    options = nccl.group_options(backend, timeout)
    group, _ = distributed_c10d._new_process_group_helper(
        world_size, 0, [], dist.Backend(backend), store, group_name=name, backend_options=options, timeout=timeout
    )
    distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group


def _leave(group: Any) -> None:
    if group is None:
        return
    with suppress(RuntimeError):
        group.abort()
    with suppress(RuntimeError, ValueError):
        dist.destroy_process_group(group)


def _first_line(error: Exception) -> str:
    """Return the error's first line, without torch's C++ stack."""
    return str(error).split("\n", 1)[0]
