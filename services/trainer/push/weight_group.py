"""The trainer's end of a weight group: rank 0 of a torch.distributed group whose other members are SGLang engines.

The rendezvous is the one of SGLang's `init_custom_process_group`, so no SGLang is needed here. No call waits longer
than its timeout: a member that died costs an immediate error or that deadline, and `close` ends a broadcast that
another thread is waiting for. After an error the group is of no use; close it and open another under a new name.
"""

import datetime
import ipaddress
import socket
import time
from contextlib import closing, suppress
from typing import Any

import structlog
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from penstock.errors import DeadlineError, SetupError, UnavailableError

log = structlog.get_logger()

_POLL_S = 0.002


class WeightGroup:
    """A group of one trainer and its engines. All methods block; call them with `asyncio.to_thread`."""

    def __init__(self, group: Any, store: Any, *, name: str, device: torch.device) -> None:
        """Wrap a process group; use `open`."""
        self.name = name
        self._group = group
        self._store = store  # the rendezvous lives as long as it is referred to
        self._device = device
        self._closed = False

    @classmethod
    def open(cls, *, host: str, port: int, world_size: int, name: str, backend: str, timeout_s: float) -> "WeightGroup":
        """Listen at `host`:`port` and wait for `world_size` - 1 members.

        Args:
            host: Address of this machine under which the members reach it.
            port: A free port; see `free_port`.
            world_size: Members, this one included.
            name: Unique name of the group.
            backend: "gloo" or "nccl".
            timeout_s: The longest to wait for all members.

        Raises:
            DeadlineError: not all members came within `timeout_s`.
            SetupError: this machine cannot listen there.
        """
        timeout = datetime.timedelta(seconds=timeout_s)
        started = time.monotonic()
        try:
            store = dist.TCPStore(host, port, world_size, is_master=True, timeout=timeout, wait_for_workers=True)
            group = _new_group(
                dist.PrefixStore(name, store), world_size=world_size, name=name, backend=backend, timeout=timeout
            )
        except dist.DistNetworkError as error:
            if time.monotonic() - started < timeout_s / 2:
                raise SetupError(
                    f"cannot listen on {host}:{port} for the weight group: {error}; choose another push.host"
                ) from None
            raise DeadlineError(
                f"weight group {name}: not all {world_size} members came within {timeout_s} s: {error}"
            ) from None
        except (dist.DistStoreError, dist.DistBackendError, RuntimeError) as error:
            raise DeadlineError(
                f"weight group {name}: not all {world_size} members came within {timeout_s} s: {error}"
            ) from None
        device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        return cls(group, store, name=name, device=device)

    def broadcast(self, bucket: torch.Tensor, *, timeout_s: float) -> None:
        """Send a bucket, uint8[bytes], to all members; back when this side is done with it.

        Raises:
            DeadlineError: it took longer than `timeout_s`.
            UnavailableError: a member is gone, or the group was closed.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = datetime.timedelta(seconds=timeout_s)
        options.asyncOp = True
        deadline = time.monotonic() + timeout_s
        group = self._group
        if group is None:
            raise UnavailableError(f"weight group {self.name} is closed; open another")
        try:
            work = group.broadcast([bucket.to(self._device)], options)
            while not work.is_completed():
                if self._closed:
                    raise UnavailableError(f"weight group {self.name} was closed during a broadcast")
                if time.monotonic() > deadline:
                    raise DeadlineError(
                        f"weight group {self.name}: a broadcast took longer than {timeout_s} s; a member hangs"
                    )
                time.sleep(_POLL_S)
            work.wait()
        except RuntimeError as error:
            raise UnavailableError(f"weight group {self.name}: broadcast failed, a member is gone: {error}") from None

    def close(self) -> None:
        """Leave the group; a broadcast that runs in another thread ends with an UnavailableError. May be repeated."""
        if self._closed:
            return
        self._closed = True
        with suppress(RuntimeError):
            self._group.abort()
        with suppress(RuntimeError, ValueError):
            dist.destroy_process_group(self._group)
        self._group = self._store = None
        log.debug("weight_group.closed", group=self.name)

    @staticmethod
    def free_port(host: str) -> int:
        """A port of this machine that is free now."""
        family = socket.AF_INET6 if _is_ipv6(host) else socket.AF_INET
        with closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
            probe.bind((host, 0))
            return int(probe.getsockname()[1])


def _new_group(store: Any, *, world_size: int, name: str, backend: str, timeout: datetime.timedelta) -> Any:
    """What SGLang's members do on their side, after torch's own `init_process_group`."""
    group, _ = distributed_c10d._new_process_group_helper(
        world_size, 0, [], dist.Backend(backend), store, group_name=name, backend_options=None, timeout=timeout
    )
    distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False
