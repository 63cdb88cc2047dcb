"""The digest notices what can go wrong with weights on their way, and nothing else."""

import threading
import weakref
from collections.abc import Iterator

import pytest
import torch

from penstock.errors import InvalidRequestError
from penstock.weights import digest
from penstock.weights.digest import (
    BLOCK_WORDS,
    MULTILINEAR,
    XXH3,
    digest_kind,
    require_digest_kind,
    tensor_digest,
    tensor_digests,
)
from tests.support.calls import num_calls

KINDS = pytest.mark.parametrize("kind", [XXH3, MULTILINEAR])
SIZES = [1, 7, BLOCK_WORDS - 1, BLOCK_WORDS, BLOCK_WORDS + 1, 3 * BLOCK_WORDS + 5]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@KINDS
def test_every_flipped_bit_shows(size: int, dtype: torch.dtype, kind: str) -> None:
    """One bit, wherever it is, changes the digest: the first, the last and those at the blocks' borders."""
    data = torch.randn(size).mul(50).to(dtype).contiguous().view(torch.uint8)
    digest = tensor_digest(data, kind)
    positions = {0, len(data) - 1, len(data) // 2, min(len(data), 4 * BLOCK_WORDS) - 1}
    for position in positions:
        for bit in range(8):
            flipped = data.clone()
            flipped[position] ^= 1 << bit
            assert tensor_digest(flipped, kind) != digest, (position, bit)


@KINDS
def test_swaps_show(kind: str) -> None:
    """Two values that change places show, even where they differ in the sign only, within a block and across blocks."""
    tensor = torch.randn(2 * BLOCK_WORDS)
    for left, right in [(0, 1), (3, BLOCK_WORDS - 1), (5, BLOCK_WORDS + 5), (0, 2 * BLOCK_WORDS - 1)]:
        for values in [(1.0, -1.0), (0.0, -0.0), (1.0, 2.0), (0.1, 0.2)]:
            first, second = tensor.clone(), tensor.clone()
            first[left], first[right] = values
            second[right], second[left] = values
            assert tensor_digest(first, kind) != tensor_digest(second, kind), (left, right, values)


@KINDS
def test_swapped_blocks_show(kind: str) -> None:
    """Whole blocks that change places show."""
    tensor = torch.randn(4 * BLOCK_WORDS)
    swapped = torch.cat([tensor[BLOCK_WORDS : 2 * BLOCK_WORDS], tensor[:BLOCK_WORDS], tensor[2 * BLOCK_WORDS :]])
    assert tensor_digest(tensor, kind) != tensor_digest(swapped, kind)


@KINDS
def test_zeros_of_different_lengths_differ(kind: str) -> None:
    """Zeros that were cut off or added show, though they add nothing to any sum."""
    zeros = [torch.zeros(size, dtype=torch.uint8) for size in [0, 1, 2, 3, 4, 5, 8, 4 * BLOCK_WORDS]]
    digests = {tensor_digest(tensor, kind) for tensor in zeros}
    assert len(digests) == 8


@KINDS
def test_layout_does_not_matter(kind: str) -> None:
    """Strides and offset are no part of a tensor's value."""
    tensor = torch.randn(96, 130)
    digest = tensor_digest(tensor, kind)
    assert digest == tensor_digest(tensor.t().contiguous().t(), kind)
    padded = torch.zeros(12481, dtype=torch.float32)
    padded[1:] = tensor.reshape(-1)
    assert digest == tensor_digest(padded[1:], kind)
    odd = torch.zeros(96 * 130 * 4 + 1, dtype=torch.uint8)
    odd[1:] = tensor.reshape(-1).view(torch.uint8)
    assert digest == tensor_digest(odd[1:], kind)


def test_multilinear_is_what_the_module_says() -> None:
    """The formula of the module's docstring, written down once more in plain integers."""
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(number: int) -> int:
        number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & mask
        number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & mask
        return number ^ (number >> 31)

    words = torch.randint(-(2**31), 2**31, (BLOCK_WORDS + 3,), dtype=torch.int64)
    multipliers = [mix(number * golden & mask) | 1 for number in range(1, BLOCK_WORDS + 1)]
    expected = mix(4 * len(words))
    for number, block in enumerate([words[:BLOCK_WORDS].tolist(), words[BLOCK_WORDS:].tolist()], 1):
        total = sum(word * multiplier for word, multiplier in zip(block, multipliers, strict=False))
        expected += mix((total + number * golden) & mask)
    assert tensor_digest(words.to(torch.int32), MULTILINEAR) == expected & mask


def test_xxh3_is_what_the_reference_says() -> None:
    """The two vectors that XXH3-64 publishes for no input and for one zero byte."""
    assert tensor_digest(torch.zeros(0, dtype=torch.uint8), XXH3) == 0x2D06800538D394C2
    assert tensor_digest(torch.zeros(1, dtype=torch.uint8), XXH3) == 0xC44BDFF4074EECDB


def test_many_are_as_one() -> None:
    """Each under its name, in threads."""
    tensors = {str(size): torch.randn(size) for size in SIZES}
    for kind in (XXH3, MULTILINEAR):
        assert tensor_digests(tensors.items(), kind) == {
            name: tensor_digest(tensor, kind) for name, tensor in tensors.items()
        }


def test_tensors_are_let_go_one_by_one() -> None:
    """Those of several ranks are made whole, each on every GPU, and all of them would not fit."""
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def make() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for number in range(200):
            tensor = torch.full((1000,), float(number))
            alive.add(tensor)
            most = max(most, len(alive))
            yield str(number), tensor
            del tensor

    found = tensor_digests(make())
    assert list(found) == [str(number) for number in range(200)]
    assert found["7"] == tensor_digest(torch.full((1000,), 7.0))
    assert most < 100


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_devices_are_read_in_the_callers_thread(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Its stream is the one in which they were written; other threads have others. A CPU's memory has no streams."""
    monkeypatch.setattr(digest, "tensor_digest", lambda _tensor, _kind: threading.get_ident())
    threads = tensor_digests([("a", torch.empty(1)), ("b", torch.empty(1, device=device))], MULTILINEAR)
    assert (threads["b"] == threading.get_ident()) is (device != "cpu")


def test_the_kind_is_that_of_the_device() -> None:
    """And a name that came from elsewhere is checked."""
    assert (digest_kind(torch.device("cpu")), digest_kind(torch.device("cuda", 1))) == (XXH3, MULTILINEAR)
    require_digest_kind(MULTILINEAR)
    with pytest.raises(InvalidRequestError, match="digest 'md5'"):
        require_digest_kind("md5")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("size", [*SIZES, 300 * BLOCK_WORDS + 1])
@KINDS
def test_devices_agree(size: int, kind: str) -> None:
    """CPU and GPU compute the same digest."""
    tensor = torch.randn(size)
    assert tensor_digest(tensor, kind) == tensor_digest(tensor.cuda(), kind)


@KINDS
def test_no_value_is_looked_at_alone(kind: str) -> None:
    """The work is that of libraries, thousands of values at a time; `bench/bench_push.py` has its speed."""
    tensor = torch.randn(2**20)
    assert num_calls(lambda: tensor_digest(tensor, kind)) < tensor.numel() / 1000
