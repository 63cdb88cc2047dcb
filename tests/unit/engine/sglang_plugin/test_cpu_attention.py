"""Attention on a CPU: many sequences at once get what each gets alone. Real SGLang's answers are compared elsewhere."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.rollout.engine.sglang_plugin import cpu_attention

HEADS, KEY_HEADS, HEAD_SIZE, NUM_PLACES = 4, 2, 8, 400
SCALE = 0.3
PLAIN = {"scaling": SCALE, "enable_gqa": True, "is_cross_attn": False, "sliding_window_size": None}


def refuse(*_: Any, **__: Any) -> Any:
    """Stand for SGLang's own attention where it must not be used."""
    pytest.fail("SGLang computed it")


class Cache:
    """Keys and values of some sequences, scattered over a pool as after many requests."""

    def __init__(self, num_keys: list[int]) -> None:
        """Fill the cache for sequences of `num_keys` tokens."""
        generator = torch.Generator().manual_seed(0)
        self.keys = torch.randn(NUM_PLACES, KEY_HEADS, HEAD_SIZE, generator=generator)
        self.values = torch.randn(NUM_PLACES, KEY_HEADS, HEAD_SIZE, generator=generator)
        self.num_keys = torch.tensor(num_keys)
        self.rows = torch.randperm(len(num_keys) + 3, generator=generator)[: len(num_keys)]
        self.places = torch.zeros(len(num_keys) + 3, max(num_keys) + 5, dtype=torch.int32)
        order = torch.randperm(NUM_PLACES, generator=generator)
        taken = 0
        for row, count in zip(self.rows.tolist(), num_keys, strict=True):
            self.places[row, :count] = order[taken : taken + count]
            taken += count
        self.unused = order[taken:]

    def query(self, num_new: list[int] | None) -> torch.Tensor:
        """Queries of each sequence's last tokens: `num_new` of them, or one each in a decode step."""
        num_tokens = len(self.num_keys) if num_new is None else sum(num_new)
        return torch.randn(num_tokens, HEADS, HEAD_SIZE, generator=torch.Generator().manual_seed(1))

    def attend(self, num_new: list[int] | None) -> torch.Tensor:
        """Attention through the hooks, with what SGLang passes to them."""
        query = self.query(num_new)
        output = torch.full_like(query, torch.nan)
        args = [query, output, self.keys, self.values, self.places, self.rows, self.num_keys]
        backend = self.planned(num_new)
        if num_new is None:
            cpu_attention.decode(refuse, backend, *args, None, causal=False, **PLAIN)
        else:
            lengths = [self.num_keys - torch.tensor(num_new), torch.tensor(num_new)]
            cpu_attention.extend(refuse, backend, *args, *lengths, None, causal=True, **PLAIN)
        return output

    def planned(self, num_new: list[int] | None) -> Any:
        """A back end that was told of the pass."""
        backend = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=self.places), forward_metadata=None)
        forward_batch = SimpleNamespace(
            seq_lens=self.num_keys,
            req_pool_indices=self.rows,
            extend_seq_lens=None if num_new is None else torch.tensor(num_new),
            forward_mode=SimpleNamespace(is_extend=lambda: num_new is not None),
        )
        cpu_attention.plan(None, backend, forward_batch)
        return backend

    def attend_alone(self, num_new: list[int] | None) -> torch.Tensor:
        """The same by the formula, token by token."""
        queries, attended = iter(self.query(num_new)), []
        for row, end, new in zip(self.rows, self.num_keys.tolist(), num_new or [1] * len(self.num_keys), strict=True):
            for last in range(end - new, end):
                places = self.places[row, : last + 1].long()
                keys, values = (each[places].repeat_interleave(2, dim=1) for each in (self.keys, self.values))
                weights = torch.softmax(SCALE * torch.einsum("hd,lhd->hl", next(queries), keys), dim=1)
                attended.append(torch.einsum("hl,lhd->hd", weights, values))
        return torch.stack(attended)


@pytest.mark.parametrize(
    ("num_keys", "num_new"),
    [
        ([1], None),
        ([7, 30, 1, 12, 30], None),
        ([7, 30, 12, 30], [7, 30, 12, 30]),
        ([7, 30, 12, 9, 31, 30, 30], [1, 4, 12, 1, 4, 1, 4]),
    ],
    ids=["one", "decode", "prompts", "prefixes"],
)
@pytest.mark.parametrize("max_block_keys", [40, 10_000], ids=["blocks", "at_once"])
def test_each_sequence_gets_what_it_gets_alone(
    num_keys: list[int], num_new: list[int] | None, max_block_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences of any lengths, with and without cached prefixes, in one block or in several."""
    monkeypatch.setattr(cpu_attention, "MAX_BLOCK_KEYS", max_block_keys)
    cache = Cache(num_keys)
    torch.testing.assert_close(cache.attend(num_new), cache.attend_alone(num_new), rtol=1e-5, atol=1e-6)


def test_a_sequence_reads_no_keys_of_others() -> None:
    """What is not a number in one sequence stays there, although a block pads the others to its length."""
    cache = Cache([3, 20])
    longest = cache.rows[1]
    cache.values[cache.places[longest, :20].long()] = torch.nan
    cache.values[cache.unused] = torch.nan
    cache.places[cache.rows[0], 3:] = cache.unused[0]  # left by an earlier request
    batched = cache.attend(None)
    assert batched[0].isfinite().all()
    assert batched[1].isnan().all()


@pytest.mark.parametrize(
    "option", [{"sliding_window_size": 4}, {"is_cross_attn": True}, {"causal": False}, {}], ids=str
)
def test_what_is_not_planned_is_left_to_sglang(option: dict[str, Any]) -> None:
    """Windows, cross attention, encoders, and a pass of which the back end was not told."""
    cache, expected = Cache([3, 5]), torch.ones(1)
    lengths = [torch.tensor([0, 0]), cache.num_keys]
    args = [torch.empty(0)] * 6 + [cache.num_keys if option else cache.num_keys.clone(), *lengths, None]
    options = {**PLAIN, "causal": True, **option}
    assert cpu_attention.extend(lambda *_, **__: expected, cache.planned([3, 5]), *args, **options) is expected
