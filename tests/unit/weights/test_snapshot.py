"""A snapshot is a copy, with each tensor once."""

from pathlib import Path

import pytest
import torch

from services.rollout.testing.simulated_replica import SHAPES, weights_of
from services.trainer.backend.export import named_weights
from services.trainer.backend.policy.load_model import load_policy
from services.trainer.weight_sync import snapshot
from services.trainer.weight_sync.snapshot import WeightSnapshot
from tests.support.weights.publishing import digests


def test_a_snapshot_is_a_copy() -> None:
    """What the optimizer does in place afterwards changes nothing, be it one tensor to a bucket or several."""
    for max_bucket_bytes in (1, 1 << 20):
        weights = weights_of(1)
        taken = WeightSnapshot.take(1, weights.items(), max_bucket_bytes=max_bucket_bytes)
        before = [bucket.clone() for bucket in taken.buckets]
        for tensor in weights.values():
            tensor.to(tensor.dtype).add_(1)
        assert all(torch.equal(bucket, copy) for bucket, copy in zip(taken.buckets, before, strict=True))
        assert taken.differing_names(digests(1)) == []
        assert taken.differing_names({**digests(1), "scale": 0, "other": 1}) == ["other", "scale"]
        assert sum(bucket.numel() for bucket in taken.buckets) == taken.manifest.num_bytes
        assert len(taken.digests) == len(SHAPES)


def test_a_digest_that_cannot_be_computed_is_heard_of_before_the_push(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that have paused would wait for it in vain."""

    def fail(tensor: torch.Tensor, kind: str) -> int:
        raise MemoryError

    monkeypatch.setattr(snapshot, "tensor_digest", fail)
    taken = WeightSnapshot.take(1, weights_of(1).items(), max_bucket_bytes=1 << 20)
    with pytest.raises(MemoryError):
        taken.wait()


def test_tied_weights_are_sent_once(tiny_model_path: Path) -> None:
    """Each memory has one name in the manifest; one that had two is refused."""
    policy = load_policy(tiny_model_path, temperature=1.0, forbidden_ids=())
    named = dict(named_weights(policy))
    taken = WeightSnapshot.take(1, named.items(), max_bucket_bytes=1 << 20)
    storages = {parameter.untyped_storage().data_ptr(): parameter for parameter in policy.model.parameters()}
    assert len(taken.manifest.tensors) == len(storages)
    assert taken.manifest.num_bytes == sum(one.numel() * one.element_size() for one in storages.values())
    assert policy.model.lm_head.weight is policy.model.model.language_model.embed_tokens.weight
    tied = {**named, "lm_head.weight": policy.model.lm_head.weight.detach()}
    with pytest.raises(ValueError, match=r"lm_head\.weight and .*embed_tokens\.weight are one tensor"):
        WeightSnapshot.take(1, tied.items(), max_bucket_bytes=1 << 20)
