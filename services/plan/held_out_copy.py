"""Decides whether the trainer may hold one more copy of the weights, for an evaluation's replicas.

A replica that takes the place of a held-out one gets the evaluation's version, which the trainer reads from the run
folder beside the versions that it publishes.
"""

from penstock.v1 import common_pb2
from services.recipe import Recipe
from services.trainer.weight_sync.held_out.choice import can_spare, choose_held_out

HELD_OUT_COPY = "copy for a replacement of a held-out replica"
"""Name of that part of a memory."""


def may_need_held_out_copy(recipe: Recipe) -> bool:
    """Return whether evaluations hold replicas out; they may if the recipe starts none and others bring them."""
    evaluation, rollout = recipe.evaluation, recipe.rollout
    if not evaluation.holds_replicas_out(recipe.trainer.num_steps):
        return False
    numbers = {
        common_pb2.REPLICA_ROLE_UNIFIED: rollout.replicas,
        common_pb2.REPLICA_ROLE_PREFILL: rollout.prefill,
        common_pb2.REPLICA_ROLE_DECODE: rollout.decode,
    }
    replicas = [
        common_pb2.Replica(replica_id=f"{role}-{number}", role=role)
        for role, count in numbers.items()
        for number in range(count)
    ]
    chosen = choose_held_out(replicas, (), num=evaluation.held_out_replicas, version=0)
    return not replicas or can_spare(replicas, chosen)
