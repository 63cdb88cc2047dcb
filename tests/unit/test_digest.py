"""The digest notices what can go wrong with weights on their way, and nothing else."""

import time

import pytest
import torch

from penstock.weights.digest import BLOCK_WORDS, tensor_digest

SIZES = [1, 7, BLOCK_WORDS - 1, BLOCK_WORDS, BLOCK_WORDS + 1, 3 * BLOCK_WORDS + 5]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_every_flipped_bit_shows(size: int, dtype: torch.dtype) -> None:
    """One bit, wherever it is, changes the digest: the first, the last and those at the blocks' borders."""
    data = torch.randn(size).mul(50).to(dtype).contiguous().view(torch.uint8)
    digest = tensor_digest(data)
    positions = {0, len(data) - 1, len(data) // 2, min(len(data), 4 * BLOCK_WORDS) - 1}
    for position in positions:
        for bit in range(8):
            flipped = data.clone()
            flipped[position] ^= 1 << bit
            assert tensor_digest(flipped) != digest, (position, bit)


def test_swaps_show() -> None:
    """Two values that change places show, even where they differ in the sign only, within a block and across blocks."""
    tensor = torch.randn(2 * BLOCK_WORDS)
    for left, right in [(0, 1), (3, BLOCK_WORDS - 1), (5, BLOCK_WORDS + 5), (0, 2 * BLOCK_WORDS - 1)]:
        for values in [(1.0, -1.0), (0.0, -0.0), (1.0, 2.0), (0.1, 0.2)]:
            first, second = tensor.clone(), tensor.clone()
            first[left], first[right] = values
            second[right], second[left] = values
            assert tensor_digest(first) != tensor_digest(second), (left, right, values)


def test_swapped_blocks_show() -> None:
    """Whole blocks that change places show."""
    tensor = torch.randn(4 * BLOCK_WORDS)
    swapped = torch.cat([tensor[BLOCK_WORDS : 2 * BLOCK_WORDS], tensor[:BLOCK_WORDS], tensor[2 * BLOCK_WORDS :]])
    assert tensor_digest(tensor) != tensor_digest(swapped)


def test_zeros_of_different_lengths_differ() -> None:
    """Zeros that were cut off or added show, though they add nothing to any sum."""
    digests = {tensor_digest(torch.zeros(size, dtype=torch.uint8)) for size in [0, 1, 2, 3, 4, 5, 8, 4 * BLOCK_WORDS]}
    assert len(digests) == 8


def test_layout_does_not_matter() -> None:
    """Strides and offset are no part of a tensor's value."""
    tensor = torch.randn(96, 130)
    assert tensor_digest(tensor) == tensor_digest(tensor.t().contiguous().t())
    padded = torch.zeros(12481, dtype=torch.float32)
    padded[1:] = tensor.reshape(-1)
    assert tensor_digest(padded[1:]) == tensor_digest(tensor)
    odd = torch.zeros(96 * 130 * 4 + 1, dtype=torch.uint8)
    odd[1:] = tensor.reshape(-1).view(torch.uint8)
    assert tensor_digest(odd[1:]) == tensor_digest(tensor)


def test_is_what_the_module_says() -> None:
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
    assert tensor_digest(words.to(torch.int32)) == expected & mask


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("size", [*SIZES, 300 * BLOCK_WORDS + 1])
def test_devices_agree(size: int) -> None:
    """CPU and GPU compute the same digest."""
    tensor = torch.randn(size)
    assert tensor_digest(tensor) == tensor_digest(tensor.cuda())


def test_is_fast() -> None:
    """At least a quarter of a GB per second, on whatever machine runs the tests (several on a free core)."""
    tensor = torch.randn(16 * 2**20)
    tensor_digest(tensor)
    started = time.process_time()
    tensor_digest(tensor)
    assert tensor.numel() * 4 / (time.process_time() - started) > 0.25e9
