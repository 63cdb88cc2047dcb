"""A snapshot is a copy, with each tensor once."""

import dataclasses
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from penstock.weights.named_weights import NamedWeights
from services.rollout.testing.simulated_replica import weights_of
from services.trainer.backend.files.export import named_weights
from services.trainer.backend.policy.load_model import load_policy
from services.trainer.weight_sync import snapshot
from services.trainer.weight_sync.snapshot import WeightSnapshot
from tests.support.weights.publishing import digests

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_a_snapshot_is_a_copy() -> None:
    """What the optimizer does in place afterwards changes nothing, be it one tensor to a bucket or several."""
    for max_bucket_bytes in (1, 1 << 20):
        weights = weights_of(1)
        taken = WeightSnapshot.take(1, NamedWeights.of(weights), max_bucket_bytes=max_bucket_bytes)
        before = [bucket.clone() for bucket in taken.buckets]
        for tensor in weights.values():
            tensor.to(tensor.dtype).add_(1)
        assert all(torch.equal(bucket, copy) for bucket, copy in zip(taken.buckets, before, strict=True))
        assert taken.digests == digests(1)
        assert sum(bucket.numel() for bucket in taken.buckets) == taken.manifest.num_bytes


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs_gpu), "cpu"])
def test_a_stream_is_copied_to_the_host_bucket_by_bucket(device: str) -> None:
    """When a bucket's tensors are made, none of those before it is left. The copy is the same wherever it is."""
    weights = {name: tensor.to(device) for name, tensor in weights_of(1).items()}
    made: list[weakref.ref[torch.Tensor]] = []
    num_left: list[int] = []

    def make() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights.items():
            num_left.append(sum(each() is not None for each in made))
            one = tensor.clone()
            made.append(weakref.ref(one))
            yield name, one
            del one

    stream = dataclasses.replace(NamedWeights.of(weights), tensors=make())
    taken = WeightSnapshot.take(1, stream, max_bucket_bytes=1, device=torch.device("cpu"))
    assert num_left == [0] * len(weights)
    whole = WeightSnapshot.take(1, NamedWeights.of(weights), max_bucket_bytes=1)
    assert (taken.manifest, taken.digests, taken.digest_kind) == (whole.manifest, whole.digests, whole.digest_kind)
    for bucket, other in zip(taken.buckets, whole.buckets, strict=True):
        assert bucket.device.type == "cpu"
        assert torch.equal(bucket, other.cpu())


def test_weights_are_those_that_were_announced() -> None:
    """Replicas fill their parameters by what was announced."""
    stream = NamedWeights.of({"a": torch.zeros(1), "b": torch.zeros(1)})
    for came, error in (
        ({"a": torch.zeros(1)}, r"\('a',\) came, \('a', 'b'\) were announced"),
        ({"b": torch.zeros(1), "a": torch.zeros(1)}, "were announced"),
        ({"a": torch.zeros(1), "b": torch.zeros(2)}, r"tensor b is .*\[2\], announced as float32\(1,\)"),
        ({"a": torch.zeros(1), "b": torch.zeros(1), "c": torch.zeros(1)}, "more weights came than the 2"),
    ):
        with pytest.raises(ValueError, match=error):
            WeightSnapshot.take(1, dataclasses.replace(stream, tensors=came.items()), max_bucket_bytes=100)


def test_a_digest_that_cannot_be_computed_is_heard_of_before_the_push(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that have paused would wait for it in vain."""

    def fail(tensor: torch.Tensor, kind: str) -> int:
        raise MemoryError

    monkeypatch.setattr(snapshot, "tensor_digest", fail)
    taken = WeightSnapshot.take(1, NamedWeights.of(weights_of(1)), max_bucket_bytes=1 << 20)
    with pytest.raises(MemoryError):
        taken.wait()


def test_tied_weights_are_sent_once(tiny_model_path: Path) -> None:
    """Each memory has one name in the manifest; one that had two is refused."""
    policy = load_policy(tiny_model_path, temperature=1.0, forbidden_ids=())
    named = dict(named_weights(policy))
    taken = WeightSnapshot.take(1, NamedWeights.of(named), max_bucket_bytes=1 << 20)
    storages = {parameter.untyped_storage().data_ptr(): parameter for parameter in policy.model.parameters()}
    assert len(taken.manifest.tensors) == len(storages)
    assert taken.manifest.num_bytes == sum(one.numel() * one.element_size() for one in storages.values())
    assert policy.model.lm_head.weight is policy.model.model.language_model.embed_tokens.weight
    tied = {**named, "lm_head.weight": policy.model.lm_head.weight.detach()}
    with pytest.raises(ValueError, match=r"lm_head\.weight and .*embed_tokens\.weight are one tensor"):
        WeightSnapshot.take(1, NamedWeights.of(tied), max_bucket_bytes=1 << 20)
