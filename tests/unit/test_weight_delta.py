"""Deltas: the old bytes become the new ones, bit by bit, and what is damaged is noticed."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import NotReadyError
from penstock.weights.delta import apply_delta, check_delta, encode_delta, write_delta
from penstock.weights.manifest import Manifest, pack


@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
    shape=st.lists(st.integers(0, 5), max_size=3),
    seed=st.integers(0, 1000),
)
def test_old_becomes_new(dtype: torch.dtype, shape: list[int], seed: int) -> None:
    """Whatever dtype and shape, no elements and no dimensions included, also in memory with gaps."""
    generator = torch.Generator().manual_seed(seed)
    old, new = (torch.randn(shape, generator=generator).mul(50).to(dtype) for _ in range(2))
    delta = encode_delta(old, new)
    gapped = torch.zeros([*shape, 2], dtype=dtype)[..., 0].copy_(old)
    for held in (old.clone(), gapped):
        apply_delta(held, delta)
        assert torch.equal(held, new)


def test_a_small_step_is_a_small_delta() -> None:
    """What an optimizer changes are low bytes, and in bfloat16 few numbers at all."""
    old = torch.randn(100_000) * 0.02
    new = old + torch.randn(100_000).sign() * 1e-6
    assert len(encode_delta(old, new)) < 0.5 * old.nbytes
    assert len(encode_delta(old.bfloat16(), new.bfloat16())) < 0.05 * old.bfloat16().nbytes
    assert len(encode_delta(old, old)) < 0.01 * old.nbytes


def test_damage_is_noticed() -> None:
    """A flipped bit, and a delta of another tensor."""
    old, new = torch.randn(1000), torch.randn(1000)
    delta = bytearray(encode_delta(old, new))
    with pytest.raises(ValueError, match="reshape"):
        apply_delta(torch.zeros(999), bytes(delta))
    delta[len(delta) // 2] ^= 1
    with pytest.raises(ValueError, match="damaged"):
        apply_delta(old.clone(), bytes(delta))


def test_the_base_is_checked(tmp_path: Path) -> None:
    """Before anything is touched."""
    old, new = {"a": torch.zeros(5)}, {"a": torch.ones(5)}
    manifest = Manifest.plan(old.items(), max_bucket_bytes=100)
    buckets = [tuple(pack(bucket, tensors) for bucket in manifest.buckets) for tensors in (old, new)]
    assert write_delta(tmp_path, manifest, *buckets, base_version=3) > 0
    check_delta(tmp_path, 3)
    with pytest.raises(NotReadyError, match="against version 3"):
        check_delta(tmp_path, 2)
    with pytest.raises(NotReadyError, match="cannot be read"):
        check_delta(tmp_path / "nowhere", 3)
