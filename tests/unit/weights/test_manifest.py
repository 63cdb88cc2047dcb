"""Manifest: what is packed is what is unpacked, in the order and within the size that was announced."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidRequestError
from penstock.v1 import rollout_pb2
from penstock.weights.manifest import ALONE_BYTES, Manifest, chunks, pack, specs_of, views

DTYPES = [torch.float32, torch.bfloat16, torch.int8]


@given(
    shapes=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), min_size=1, max_size=12
    ),
    max_bucket_bytes=st.integers(1, 400),
)
def test_pack_and_views_are_inverse(shapes: list[tuple[torch.dtype, list[int]]], max_bucket_bytes: int) -> None:
    """Any tensors come through any bucket size bit by bit, in order, aligned, and over the wire."""
    tensors = {
        f"layer.{index}": torch.randint(-100, 100, shape).to(dtype) for index, (dtype, shape) in enumerate(shapes)
    }
    manifest = Manifest.plan(specs_of(tensors), max_bucket_bytes=max_bucket_bytes)
    assert [spec.name for spec in manifest.tensors] == list(tensors)
    received = Manifest.from_proto(rollout_pb2.WeightManifest.FromString(manifest.to_proto().SerializeToString()))
    assert received == manifest
    arrived: dict[str, torch.Tensor] = {}
    for bucket in manifest.buckets:
        data = pack(bucket, tensors)
        assert len(data) <= max_bucket_bytes or len(bucket) == 1 or len(data) == bucket[0].num_bytes
        offset = 0
        for spec in bucket:
            assert offset % tensors[spec.name].element_size() == 0
            offset += spec.num_bytes
        arrived |= views(bucket, data)
    assert list(arrived) == list(tensors)
    for name, tensor in tensors.items():
        assert arrived[name].dtype == tensor.dtype
        assert torch.equal(arrived[name], tensor)
    assert manifest.num_bytes == sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def test_buckets_fill_up_to_the_limit() -> None:
    """4 + 4 bytes fit into 8, the next starts a bucket, and one above the limit travels alone."""
    sizes = {"a": 4, "b": 4, "c": 4, "big": 20, "d": 1}
    tensors = {name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes.items()}
    manifest = Manifest.plan(specs_of(tensors), max_bucket_bytes=8)
    assert [[spec.name for spec in bucket] for bucket in manifest.buckets] == [["a", "b"], ["c"], ["big"], ["d"]]


def test_large_tensors_travel_alone() -> None:
    """They need no packing, and what comes after them starts another bucket."""
    sizes = {"a": 4, "large": ALONE_BYTES, "b": 4, "c": 4}
    tensors = {name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes.items()}
    manifest = Manifest.plan(specs_of(tensors), max_bucket_bytes=1 << 30)
    assert [[spec.name for spec in bucket] for bucket in manifest.buckets] == [["a"], ["large"], ["b", "c"]]


def test_large_buckets_are_broadcast_in_chunks() -> None:
    """Views of the bucket itself, in order, the last one shorter; an empty bucket is one, too."""
    data = torch.arange(10, dtype=torch.uint8)
    assert [chunk.tolist() for chunk in chunks(data, 4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [chunk.numel() for chunk in chunks(data, 10)] == [chunk.numel() for chunk in chunks(data, 0)] == [10]
    assert [chunk.numel() for chunk in chunks(data[:0], 4)] == [0]
    chunks(data, 4)[1].zero_()
    assert data.tolist() == [0, 1, 2, 3, 0, 0, 0, 0, 8, 9]


def test_a_name_occurs_once() -> None:
    """Tied parameters are one parameter."""
    with pytest.raises(ValueError, match="occurs twice"):
        Manifest.plan(2 * specs_of({"a": torch.zeros(1)}), max_bucket_bytes=8)


def test_pack_refuses_other_tensors_than_announced() -> None:
    """A shape or dtype that changed since the manifest was made is noticed before anything is sent."""
    manifest = Manifest.plan(specs_of({"a": torch.zeros(2, 3)}), max_bucket_bytes=100)
    for tensor in (torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64)):
        with pytest.raises(ValueError, match="announced as float32"):
            pack(manifest.buckets[0], {"a": tensor})
    with pytest.raises(ValueError, match="has 23 bytes"):
        views(manifest.buckets[0], torch.zeros(23, dtype=torch.uint8))


def _tensor(**fields: object) -> rollout_pb2.WeightBucket:
    return rollout_pb2.WeightBucket(tensors=[rollout_pb2.TensorSpec(**fields)])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("buckets", "message"),
    [
        ([], "empty bucket, or no buckets"),
        ([rollout_pb2.WeightBucket()], "empty bucket, or no buckets"),
        ([_tensor(name="a", dtype="float33", shape=[1])], "'float33'"),
        ([_tensor(name="a", dtype="nn", shape=[1])], "'nn'"),
        ([_tensor(name="a", dtype="float32", shape=[-1])], "a has shape"),
        ([_tensor(name="a", dtype="float32"), _tensor(name="a", dtype="float32")], "twice"),
    ],
)
def test_wrong_messages_are_refused(buckets: list[rollout_pb2.WeightBucket], message: str) -> None:
    """What cannot be a push is refused when it is announced."""
    with pytest.raises(InvalidRequestError, match=message):
        Manifest.from_proto(rollout_pb2.WeightManifest(buckets=buckets))
