"""Begins the ranks of a trainer: as processes of its own on this machine, or as those that torchrun has started.

Under torchrun every rank is started as the trainer is, on one machine or several. Rank 0 is the trainer with all that
it talks to; the others follow it.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from penstock.errors import ConfigError
from penstock.model.families.experts import num_experts
from penstock.model.families.linear_attention import has_linear_attention
from penstock.model.folder import attention_heads
from services.trainer.backend.base import SupervisedBackend, TrainBackend
from services.trainer.backend.device import resolve_device
from services.trainer.backend.in_process import InProcessBackend
from services.trainer.backend.ranks.beats import Pulse
from services.trainer.backend.ranks.many_ranks import ManyRanksBackend, ManyRanksSupervisedBackend, follow
from services.trainer.backend.ranks.processes import RankProcesses
from services.trainer.backend.ranks.ranks import Ranks
from services.trainer.backend.ranks.starts import catching_up
from services.trainer.backend.ranks.torchrun import TorchrunRanks
from services.trainer.backend.supervised import InProcessSupervisedBackend
from services.trainer.checks.expert_parallel import require_divisible
from services.trainer.checks.sequence_parallel import require_shareable
from services.trainer.config import BackendConfig

OwnT = TypeVar("OwnT", InProcessBackend, InProcessSupervisedBackend)

_TORCHRUN = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
_MEETING = timedelta(minutes=30)
"""Rank 0 opens the run's data before it joins the others."""


def is_follower() -> bool:
    """Return whether torchrun has started this process as a rank that is not the first.

    Raises:
        ConfigError: its variables are not those of torchrun.
    """
    return (_torchruns_size() or 1) > 1 and _whole("RANK") > 0


def open_ranks(backend: Mapping[str, Any], *, num_ranks: int) -> TrainBackend:
    """Return the backend of one rank, or of as many as are asked for, all of which are started. Blocks.

    Args:
        backend: Arguments of `InProcessBackend`, the same for every rank.
        num_ranks: `trainer.ranks`.

    Raises:
        ConfigError: torchrun has started another number of ranks, or its variables are incomplete, there are fewer GPUs
            than ranks, or the ranks cannot be divided into replicas, or the model's experts or heads among them.
    """
    size = _num_started(num_ranks)
    _require_divisible(backend, size)
    if size == 1:
        return InProcessBackend(**backend)
    config: BackendConfig = backend["config"]
    if _torchruns_size() is None:
        return ManyRanksBackend(*_started(InProcessBackend, backend, config, size))
    pulse = Pulse()
    ranks, others = _join_torchrun(config.device, pulse)
    return ManyRanksBackend(InProcessBackend(**backend, ranks=ranks), ranks, others, pulse)


def open_supervised_ranks(backend: Mapping[str, Any], *, num_ranks: int) -> SupervisedBackend:
    """Return the backend of supervised training on one rank, or on as many as are asked for. Blocks.

    Args:
        backend: Arguments of `InProcessSupervisedBackend`, the same for every rank.
        num_ranks: `trainer.ranks`.

    Raises:
        ConfigError: torchrun has started several ranks, there are fewer GPUs than ranks, or the ranks cannot be
            divided into replicas, or the model's experts or heads among them.
    """
    if (size := _torchruns_size() or 1) > 1:
        raise ConfigError(
            f"WORLD_SIZE is {size}, but supervised training starts its ranks itself; start it "
            "without torchrun, and set trainer.ranks"
        )
    _require_divisible(backend, num_ranks)
    if num_ranks == 1:
        return InProcessSupervisedBackend(**backend)
    config: BackendConfig = backend["config"]
    return ManyRanksSupervisedBackend(*_started(InProcessSupervisedBackend, backend, config, num_ranks))


def _started(
    kind: type[OwnT], backend: Mapping[str, Any], config: BackendConfig, size: int
) -> tuple[OwnT, Ranks, RankProcesses, Pulse]:
    """Start all other ranks, and return rank 0's part, the ranks, their processes, and the pulse of this one."""
    placed = prepare_device(config.device, local_rank=0, num_local=size)
    # A file without a name, which only processes of this user can open: what ranks tell each other is not signed. It
    # lives as long as they do, since a group may look into it when it is first used.
    store = os.memfd_create("penstock-ranks")
    pulse = Pulse()
    processes = RankProcesses.start(size, store=store, device=placed.type, pulse=pulse)
    ranks = join_on_this_machine(store, rank=0, size=size, device=placed)
    pulse.count_collectives = ranks.num_collectives
    ranks.broadcast((kind, dict(backend)))
    return kind(**backend, ranks=ranks), ranks, processes, pulse


def _require_divisible(backend: Mapping[str, Any], num_ranks: int) -> None:
    expert_parallel = backend.get("expert_parallel", 1)
    require_divisible(expert_parallel, num_ranks=num_ranks, num_experts=num_experts(backend["model_path"]))
    heads, kv_heads = attention_heads(backend["model_path"])
    require_shareable(
        backend.get("sequence_parallel", 1),
        num_ranks=num_ranks,
        num_heads=heads,
        num_kv_heads=kv_heads,
        attends_linearly=has_linear_attention(backend["model_path"]),
    )
    num_replicas = backend.get("hsdp_replicas", 1)
    if num_ranks % num_replicas:
        raise ConfigError(
            f"trainer.hsdp_replicas = {num_replicas} does not divide the number of ranks, {num_ranks}; choose a number "
            "that does, or start another number of ranks"
        )


def follow_torchrun(backend: Mapping[str, Any], *, num_ranks: int) -> None:
    """Be one of torchrun's ranks until rank 0 ends. Blocks.

    Raises:
        ConfigError: as `open_ranks`.
    """
    _require_divisible(backend, _num_started(num_ranks))
    pulse = Pulse()
    ranks, others = _join_torchrun(backend["config"].device, pulse)
    follow(InProcessBackend(**backend, ranks=ranks), ranks, pulse)
    others.close()


def prepare_device(device: str, *, local_rank: int, num_local: int) -> torch.device:
    """Take this rank's GPU, or its share of the processor, and return the device.

    Args:
        device: `trainer.device`.
        local_rank: Number of the rank on this machine.
        num_local: Ranks on this machine.

    Raises:
        ConfigError: there are fewer GPUs than ranks.
    """
    if resolve_device(device) == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // num_local))
        return torch.device("cpu")
    if (num_gpus := torch.cuda.device_count()) < num_local:
        raise ConfigError(
            f"trainer.ranks: {num_local} ranks of this machine need a GPU each, and torch finds {num_gpus}; lower it, "
            "or show the trainer more with CUDA_VISIBLE_DEVICES"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def join_on_this_machine(store: int, *, rank: int, size: int, device: torch.device) -> Ranks:
    """Form the group of ranks that all run on this machine and share an open file. Blocks."""
    with _gloo_over_loopback():
        return Ranks.join(dist.FileStore(f"/proc/self/fd/{store}", size), rank=rank, size=size, device=device)


def _join_torchrun(device: str, pulse: Pulse) -> tuple[Ranks, TorchrunRanks]:
    placed = prepare_device(device, local_rank=_whole("LOCAL_RANK"), num_local=_whole("LOCAL_WORLD_SIZE"))
    store, rank, size = next(dist.rendezvous("env://", timeout=_MEETING))
    start = _whole(_RESTARTS) if _RESTARTS in os.environ else 0
    with catching_up(store, rank=rank, start=start):
        # torchrun's store outlives its ranks, and holds their addresses when it starts them again.
        store = dist.PrefixStore(f"start {start}", store)
        ranks = Ranks.join(store, rank=rank, size=size, device=placed)
    pulse.count_collectives = ranks.num_collectives
    return ranks, TorchrunRanks.watch(store, rank=rank, size=size, pulse=pulse)


def _num_started(num_ranks: int) -> int:
    """Return the number of ranks to start."""
    started = _torchruns_size() or num_ranks
    if num_ranks not in (1, started):
        raise ConfigError(
            f"trainer.ranks = {num_ranks}, but WORLD_SIZE is {started}: torchrun has started the ranks already; leave "
            "trainer.ranks out, or start the trainer without torchrun"
        )
    return started


def _torchruns_size() -> int | None:
    """Return how many ranks torchrun has started; None if it has not started this process.

    Raises:
        ConfigError: some of its variables are set, and others are not, or are no numbers.
    """
    if "WORLD_SIZE" not in os.environ:
        return None
    size = _whole("WORLD_SIZE")
    if size > 1 and (missing := [name for name in _TORCHRUN if name not in os.environ]):
        raise ConfigError(
            f"WORLD_SIZE is {size}, but {', '.join(missing)} are not set, and torchrun sets them together; unset "
            "WORLD_SIZE, or start the ranks with torchrun"
        )
    return size


def _whole(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise ConfigError(
            f"{name} is {os.environ[name]!r}, where torchrun sets a whole number; unset it, or start the ranks with "
            "torchrun"
        ) from None


@contextmanager
def _gloo_over_loopback() -> Iterator[None]:
    """Have gloo's groups that form within the context use the loopback interface, and those after it their own."""
    name = "GLOO_SOCKET_IFNAME"
    before = os.environ.get(name)
    os.environ[name] = "lo"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
