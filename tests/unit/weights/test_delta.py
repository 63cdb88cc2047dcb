"""Pieces: the old bytes become the new ones, bit by bit, and what is damaged is noticed."""

import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.weights import delta
from penstock.weights.delta import apply_block, apply_blocks, encode_block, read_blocks, write_blocks
from penstock.weights.manifest import Manifest, pack, specs_of


@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
    shape=st.lists(st.integers(0, 5), max_size=3),
    seed=st.integers(0, 1000),
)
def test_old_becomes_new(dtype: torch.dtype, shape: list[int], seed: int) -> None:
    """Whatever dtype and shape, no elements and no dimensions included, also in memory with gaps."""
    generator = torch.Generator().manual_seed(seed)
    old, new = (torch.randn(shape, generator=generator).mul(50).to(dtype) for _ in range(2))
    gapped = torch.zeros([*shape, 2], dtype=dtype)[..., 0].copy_(old)
    for held in (old.clone(), gapped):
        apply_block(held, encode_block(old, new), is_delta=True)
        assert torch.equal(held, new)
        apply_block(held, encode_block(None, old), is_delta=False)
        assert torch.equal(held, old)


def test_a_small_step_is_a_small_delta() -> None:
    """What an optimizer changes are low bytes, and in bfloat16 few numbers at all."""
    old = torch.randn(100_000) * 0.02
    new = old + torch.randn(100_000).sign() * 1e-6
    assert len(encode_block(old, new)) < 0.5 * old.nbytes
    assert len(encode_block(old.bfloat16(), new.bfloat16())) < 0.05 * old.bfloat16().nbytes
    assert len(encode_block(old, old)) < 0.01 * old.nbytes
    assert len(encode_block(None, old.bfloat16())) < 0.9 * old.bfloat16().nbytes


def test_damage_is_noticed() -> None:
    """A flipped bit, and a block of another tensor."""
    old, new = torch.randn(1000), torch.randn(1000)
    block = bytearray(encode_block(old, new))
    with pytest.raises(ValueError, match="does not fit tensor"):
        apply_block(torch.zeros(999), bytes(block), is_delta=True)
    block[len(block) // 2] ^= 1
    with pytest.raises(ValueError, match="damaged"):
        apply_block(old.clone(), bytes(block), is_delta=True)


def test_a_file_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several buckets, tensors of many blocks, of one and of none, one with gaps in memory; against a base, and not."""
    monkeypatch.setattr(delta, "BLOCK_BYTES", 64)
    shapes = {"a": (torch.float32, (7, 11)), "b": (torch.bfloat16, (3,)), "c": (torch.float32, (0,))}
    old, new = ({name: torch.randn(shape).to(dtype) for name, (dtype, shape) in shapes.items()} for _ in range(2))
    manifest = Manifest.plan(specs_of(old), max_bucket_bytes=300)
    buckets = [[pack(bucket, tensors) for bucket in manifest.buckets] for tensors in (old, new)]
    for base in (buckets[0], None):
        file = io.BytesIO()
        assert write_blocks(file, manifest, buckets[1], old=base) == len(file.getvalue())
        assert len(file.getvalue()) > 5 * 8  # 77 floats are five blocks
        gapped = torch.zeros(7, 22)[:, ::2].copy_(old["a"])
        held = {name: tensor.clone() for name, tensor in old.items()} | {"a": gapped}
        file.seek(0)
        apply_blocks(file, manifest.tensors, held, is_delta=base is not None)
        assert all(torch.equal(held[name], new[name]) for name in shapes)
        file.seek(0)
        if base is None:
            assert all(torch.equal(tensor, new[name]) for name, tensor in read_blocks(file, manifest.tensors))
    for cut in (len(file.getvalue()) - 1, 4):
        with pytest.raises(ValueError, match="blocks end"):
            apply_blocks(io.BytesIO(file.getvalue()[:cut]), manifest.tensors, held, is_delta=False)
