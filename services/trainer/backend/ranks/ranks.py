"""The processes that compute steps together, as one of them sees them.

Invariant: every rank calls the same methods in the same order. What `gather` returns is the same on all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

from penstock.errors import PenstockError
from services.trainer.backend.ranks.expert_groups import ExpertGroups
from services.trainer.backend.ranks.sequence_groups import SequenceGroup

ValueT = TypeVar("ValueT")

_COMPUTING = timedelta(minutes=30)
"""The longest that ranks wait for each other inside a command: more than a row takes, or reading a checkpoint."""
_NEVER = timedelta(days=365)
"""For the next command they wait as long as a rollout takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Which of how many this process is."""

    rank: int = 0
    size: int = 1
    mesh: Any = None
    """torch's DeviceMesh of all ranks, [replicas, shards] if there are replicas; None for a rank alone."""
    num_replicas: int = 1
    """Groups of neighbouring ranks, each of which holds shards of all weights."""
    sequence_group: SequenceGroup = field(default_factory=SequenceGroup)
    """Neighbouring ranks that compute each row together."""
    _values: Any = None
    """Group for what the ranks tell each other through the hosts' memory."""
    _commands: Any = None
    """Group for what rank 0 tells the others."""
    _files: Any = None
    """Group of the threads that write a checkpoint beside the commands."""
    _rows: Any = None
    """Group of what ranks of other machines send to rank 0. Its ranks do not come to the same place together, so
    `num_collectives` leaves it out."""
    _expert_groups: dict[int, ExpertGroups] = field(default_factory=dict, compare=False)
    """Those that were formed, by their size."""
    _sequence_groups: dict[int, SequenceGroup] = field(default_factory=dict, compare=False)
    """Those that were formed, by their size."""
    _replicated: dict[int, Any] = field(default_factory=dict, compare=False)
    """Meshes with replicas that were formed, by the number of replicas."""

    @classmethod
    def join(cls, store: dist.Store, *, rank: int, size: int, device: torch.device) -> Self:
        """Form the group of all ranks, which share `store`. Blocks until the last one has come."""
        from torch.distributed.device_mesh import init_device_mesh

        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_COMPUTING)
        return cls(
            rank=rank,
            size=size,
            mesh=init_device_mesh(device.type, (size,)),
            _values=dist.new_group(backend="gloo", timeout=_COMPUTING),
            _commands=dist.new_group(backend="gloo", timeout=_NEVER),
            _files=dist.new_group(backend="gloo", timeout=_COMPUTING),
            _rows=dist.new_group(backend="gloo", timeout=_COMPUTING),
        )

    def replicated(self, num_replicas: int) -> Self:
        """Return the same ranks in groups that each hold shards of all weights. All ranks must call this together.

        Each mesh is formed once. torch takes equal meshes for one and caches what it derives from them. So parameters
        on a second mesh would be in the groups of the first, on some ranks or on all.

        Args:
            num_replicas: How many groups; it divides the number of ranks.
        """
        if num_replicas == self.num_replicas:
            return self
        from torch.distributed.device_mesh import init_device_mesh

        if num_replicas not in self._replicated:
            shape = (num_replicas, self.size // num_replicas)
            self._replicated[num_replicas] = init_device_mesh(
                self.mesh.device_type, shape, mesh_dim_names=("replicate", "shard")
            )
        return replace(self, mesh=self._replicated[num_replicas], num_replicas=num_replicas)

    def expert_groups(self, size: int) -> ExpertGroups | None:
        """Return this rank's groups of expert parallelism; None if a rank owns all experts.

        Args:
            size: `trainer.expert_parallel`; it divides the number of ranks.
        """
        if size > 1 and size not in self._expert_groups:
            self._expert_groups[size] = ExpertGroups.form(
                size, rank=self.rank, num_ranks=self.size, device_type=self.mesh.device_type, timeout=_COMPUTING
            )
        return self._expert_groups.get(size)

    def sharing_rows(self, size: int) -> Self:
        """Return the same ranks in groups that compute each row together. All ranks must call this together.

        Args:
            size: `trainer.sequence_parallel`; it divides the number of ranks.
        """
        if size == self.sequence_group.size:
            return self
        if size == 1:
            return replace(self, sequence_group=SequenceGroup())
        if size not in self._sequence_groups:
            self._sequence_groups[size] = SequenceGroup.form(
                size, rank=self.rank, num_ranks=self.size, timeout=_COMPUTING
            )
        return replace(self, sequence_group=self._sequence_groups[size])

    @property
    def num_row_groups(self) -> int:
        """Groups of ranks, each of which computes a row at a time."""
        return self.size // self.sequence_group.size

    @property
    def row_group(self) -> int:
        """Number of this rank's group."""
        return self.rank // self.sequence_group.size

    def num_collectives(self) -> int:
        """Return how many collectives of commands this rank has entered, as torch counts them; see `beats`."""
        meshes = [self.mesh, *self._replicated.values(), *(each.mesh for each in self._expert_groups.values())]
        groups = [group for mesh in meshes for group in mesh.get_all_groups()]
        groups += [each.exchange for each in self._expert_groups.values()]
        groups += [each.exchange for each in self._sequence_groups.values()]
        different = {id(group): group for group in (dist.group.WORLD, self._values, *groups)}
        return sum(group._get_sequence_number_for_group() for group in different.values())

    def gather(self, value: ValueT) -> list[ValueT]:
        """Return the value of every rank."""
        return self._gather(value, self._values)

    def on_each(self, work: Callable[[], ValueT]) -> ValueT:
        """Return what `work` returns on this rank; raise on every rank if it has failed on one.

        For work that does not need other ranks and may fail on one of them alone, such as reading a file that only one
        machine lacks. Otherwise the others would wait for that rank in their next collective.

        Raises:
            PenstockError: it failed on this rank; or on another, which the message then names.
            RuntimeError: another rank failed otherwise.
        """
        if self.size == 1:
            return work()
        try:
            value = work()
        except Exception as error:
            self.gather(error if isinstance(error, PenstockError) else RuntimeError(repr(error)))
            raise
        failures: list[Exception | None] = self.gather(None)
        for rank, failure in enumerate(failures):
            if failure is not None:
                raise type(failure)(f"rank {rank} cannot go on: {failure}")
        return value

    def gather_written(self, value: ValueT) -> list[ValueT]:
        """Return the value of every rank, as `gather`, but from threads that write beside the commands."""
        return self._gather(value, self._files)

    def _gather(self, value: ValueT, group: Any) -> list[ValueT]:
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=group)
        return values

    def send(self, data: torch.Tensor) -> None:
        """Send a tensor, in the host's memory, to rank 0, which must `receive` it."""
        dist.send(data, 0, group=self._rows)

    def receive(self, data: torch.Tensor, rank: int) -> None:
        """Fill a tensor, in the host's memory, with what a rank sends to rank 0."""
        dist.recv(data, rank, group=self._rows)

    def in_order(self, parts: Sequence[tuple[int, ValueT]]) -> list[ValueT]:
        """Return the numbered parts of all ranks by their numbers. Ranks that share rows have the same parts."""
        if self.size == 1:
            return [part for _, part in parts]
        own = [] if self.sequence_group.number else list(parts)
        together = [each for of_rank in self.gather(own) for each in of_rank]
        return [part for _, part in sorted(together, key=lambda each: each[0])]

    def norm(self, of_shard: torch.Tensor) -> torch.Tensor:
        """Return the 2-norm of something of which each rank holds a shard, given that of this rank's shard."""
        if self.size == 1:
            return of_shard
        squares = [norm**2 for norm in self.gather(float(of_shard.double()))]
        squares = squares[: self.size // self.num_replicas]  # the first replica's: others hold the same shards
        return torch.tensor(sum(squares), dtype=torch.float64).sqrt().to(of_shard)

    def broadcast(self, value: Any) -> Any:
        """Return what rank 0 gives; what the others give is not looked at."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._commands)
        return values[0]


ALONE = Ranks()
