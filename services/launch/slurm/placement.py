"""Divides a run's engines and workers among nodes. Pure.

The first node has the trainer with all its ranks, NATS, router, reward service and at least one worker. Engines go to
the other nodes first, one to each in turn, as far as their GPUs reach.
"""

import dataclasses
from collections.abc import Iterator

from penstock.errors import ConfigError
from services.recipe import Recipe

ROLES = ("unified", "prefill", "decode")


@dataclasses.dataclass(slots=True, kw_only=True)
class NodeShare:
    """What one node runs, besides the trainer and the services of the first."""

    unified: int = 0
    prefill: int = 0
    decode: int = 0
    workers: int = 0

    @property
    def num_engines(self) -> int:
        """Engines of all roles."""
        return self.unified + self.prefill + self.decode

    def describe(self) -> str:
        """Describe it: "2 engines, 1 worker"."""
        parts = [_counted(self.unified, "engine"), _counted(self.prefill, "prefill engine")]
        parts += [_counted(self.decode, "decode engine"), _counted(self.workers, "worker")]
        return ", ".join(filter(None, parts)) or "nothing"

    @property
    def can_be_a_recipe(self) -> bool:
        """Whether [rollout] takes these numbers: prefill without decode engines generates nothing by itself."""
        return bool(self.unified) or (self.prefill == 0) == (self.decode == 0)


def place(recipe: Recipe, *, num_nodes: int) -> list[NodeShare]:
    """Return the share of each node.

    Args:
        recipe: Its [rollout] and [worker] give the numbers of the whole run.
        num_nodes: Nodes of the job, each with `slurm.gpus_per_node` GPUs.

    Raises:
        ConfigError: the GPUs do not suffice.
    """
    rollout, num_workers = recipe.rollout, recipe.worker.num
    if num_nodes == 1:
        return [
            NodeShare(unified=rollout.replicas, prefill=rollout.prefill, decode=rollout.decode, workers=num_workers)
        ]
    rooms = _rooms(recipe, num_nodes)
    shares: list[NodeShare] | None = None
    for pairs_on_first in (True, False):
        shares = _divided(recipe, rooms, pairs_on_first=pairs_on_first)
        if shares is not None and shares[0].can_be_a_recipe:
            break
    if shares is None or not shares[0].can_be_a_recipe:
        raise ConfigError(_explain_shortage(recipe, num_nodes))
    for index in range(num_workers):
        shares[index % num_nodes].workers += 1
    return shares


def _rooms(recipe: Recipe, num_nodes: int) -> list[int]:
    """Return how many engines fit each node; on CPUs, all of them."""
    rollout, num_gpus = recipe.rollout, recipe.slurm.gpus_per_node
    if not num_gpus:
        return [rollout.replicas + rollout.prefill + rollout.decode] * num_nodes
    num_ranks = recipe.trainer.ranks if recipe.trainer.device != "cpu" else 0
    if num_ranks > num_gpus:
        raise ConfigError(
            f"trainer.ranks = {num_ranks}: the trainer starts its ranks on one node, which has slurm.gpus_per_node = "
            f"{num_gpus} GPUs; lower it to at most {num_gpus}"
        )
    return [(num_gpus - num_ranks) // rollout.tensor_parallel, *[num_gpus // rollout.tensor_parallel] * (num_nodes - 1)]


def _divided(recipe: Recipe, rooms: list[int], *, pairs_on_first: bool) -> list[NodeShare] | None:
    """Deal out the engines, role by role, beginning with the second node; None if they do not fit."""
    left, shares = list(rooms), [NodeShare() for _ in rooms]
    wanted = dict(zip(ROLES, (recipe.rollout.replicas, recipe.rollout.prefill, recipe.rollout.decode), strict=True))
    for role, count in wanted.items():
        order = [*range(1, len(rooms)), *([0] if role == "unified" or pairs_on_first else [])]
        for index in _turns(order, left, count):
            setattr(shares[index], role, getattr(shares[index], role) + 1)
            left[index] -= 1
            count -= 1
        if count:
            return None
    return shares


def _turns(order: list[int], left: list[int], count: int) -> Iterator[int]:
    """Yield up to `count` nodes in turn, as long as they have room, which the caller takes."""
    while count and any(left[index] for index in order):
        for index in order:
            if count and left[index]:
                yield index
                count -= 1


def _explain_shortage(recipe: Recipe, num_nodes: int) -> str:
    rollout, num_ranks = recipe.rollout, recipe.trainer.ranks if recipe.trainer.device != "cpu" else 0
    num_engines = rollout.replicas + rollout.prefill + rollout.decode
    rooms = _rooms(recipe, num_nodes)
    if sum(rooms) >= num_engines:
        return (
            f"rollout.prefill = {rollout.prefill} and decode = {rollout.decode} cannot be divided among {num_nodes} "
            "nodes: the first would have engines of one of the two roles only; change the numbers, or give more --nodes"
        )
    trainer = f" beside the trainer's {num_ranks}" if num_ranks else ""
    return (
        f"{num_engines} {'engine' if num_engines == 1 else 'engines'} with rollout.tensor_parallel = "
        f"{rollout.tensor_parallel} do not fit {num_nodes} nodes with slurm.gpus_per_node = "
        f"{recipe.slurm.gpus_per_node}, which have room for {sum(rooms)}{trainer}; lower the number of engines "
        "(rollout.replicas, prefill, decode), or give more --nodes"
    )


def _counted(number: int, noun: str) -> str:
    return "" if not number else f"{number} {noun}{'' if number == 1 else 's'}"
