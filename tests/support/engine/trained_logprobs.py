"""What the trainer makes of samples: read as a group, packed as a batch, scored by its model."""

from collections.abc import Mapping
from pathlib import Path

import torch

from penstock.model.tokens import forbidden_token_ids
from penstock.records import Group, GroupId, Sample
from services.trainer.backend.policy.load_model import load_policy
from services.trainer.backend.policy.model import PolicyModel
from tests.support.engine.reference import Reference
from tests.support.trainer.read_groups import reader_of
from tests.support.trainer.rows import row_of


def policy_of(reference: Reference, model_path: Path, *, temperature: float) -> PolicyModel:
    """The trainer's model with the reference's weights."""
    policy = load_policy(model_path, temperature=temperature, forbidden_ids=forbidden_token_ids(model_path))
    policy.model.load_state_dict(reference.model.state_dict())
    return policy


@torch.no_grad()
def trained_logprobs(
    policy: PolicyModel, sample: Sample, images: Mapping[str, bytes], model_path: Path
) -> torch.Tensor:
    """Of each token that the policy wrote in a sample of one sequence; `images` are by hash."""
    group_id = GroupId(run_id="r", index=0, attempt=0, trainer_epoch="a")
    group = Group(id=group_id, num_samples=1, samples=(sample,), worker_id="w")
    reader = reader_of(model_path, forbidden_ids=forbidden_token_ids(model_path))
    [sequence] = reader.read(group, images).sequences
    return policy(row_of(sequence)).logprobs_N
