"""Linear attention in an engine on a CPU: its functions, in SGLang's order, compute transformers' layer; and what keeps
its weights those of the trainer. Real SGLang's answers are compared elsewhere."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.layernorm import GemmaRMSNorm
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch.nn.functional import linear

from penstock.weights.manifest import Manifest, pack, specs_of
from penstock.weights.weight_files import write_weight_files
from services.rollout.engine.sglang_plugin import weight_loader
from services.rollout.engine.sglang_plugin.linear_attention import hooks, on_cpu
from services.rollout.engine.sglang_plugin.linear_attention.hooks import round_decay
from services.rollout.engine.sglang_plugin.shards import Shard
from services.rollout.engine.sglang_plugin.transports import DiskTransport
from tests.support.trainer.families import heard, random_qwen3_5_text

NUM_SLOTS = 12
CLOSE = 1e-5


class Layer:
    """A layer of transformers, and the same as SGLang computes it through the functions, with a pool of states.

    Slots hold what other requests have left, but for zeros in the states of sequences without a prefix.
    """

    def __init__(self) -> None:
        self.theirs = heard(random_qwen3_5_text()).model.layers[1].linear_attn
        generator = torch.Generator().manual_seed(2)
        self.windows = torch.randn(NUM_SLOTS, self.theirs.conv_dim, 3, generator=generator)
        sizes = (self.theirs.num_v_heads, self.theirs.head_v_dim, self.theirs.head_k_dim)
        self.states = torch.randn(NUM_SLOTS, *sizes, generator=generator)
        self.weight = self.theirs.conv1d.weight[:, 0].detach()

    def inputs(self, length: int, *, seed: int) -> torch.Tensor:
        """What a sequence's tokens bring, [tokens, hidden size]."""
        return torch.randn(length, 64, generator=torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def alone(self, inputs: torch.Tensor) -> torch.Tensor:
        """A sequence in transformers."""
        outputs: torch.Tensor = self.theirs(inputs[None])[0]
        return outputs

    def split(self, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What is convolved, its gates, b and a, from SGLang's two projections."""
        theirs = self.theirs
        qkvz = torch.cat([theirs.in_proj_qkv.weight, theirs.in_proj_z.weight])
        ba = torch.cat([theirs.in_proj_b.weight, theirs.in_proj_a.weight])
        heads = (theirs.num_k_heads, theirs.num_v_heads, theirs.head_k_dim, theirs.head_v_dim)
        return on_cpu.split_projections(linear(inputs, qkvz), linear(inputs, ba), *heads)

    def joined(self, outputs: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """The layer's outputs from those of the rule."""
        norm = SimpleNamespace(weight=self.theirs.norm.weight, eps=self.theirs.norm.variance_epsilon)
        normed = on_cpu.norm_gated(norm, outputs[0].flatten(0, 1), gates.flatten(0, 1))
        return linear(normed.view(len(gates), -1), self.theirs.out_proj.weight)

    @torch.no_grad()
    def extend(self, parts: list[torch.Tensor], slots: list[int], *, have_prefix: list[bool]) -> list[torch.Tensor]:
        """Compute new tokens of several sequences in one pass."""
        theirs, lengths = self.theirs, [len(part) for part in parts]
        for slot, has_prefix in zip(slots, have_prefix, strict=True):
            if not has_prefix:
                self.states[slot] = 0
        places = {
            "query_start_loc": torch.tensor([0, *lengths]).cumsum(0).int(),
            "cache_indices": torch.tensor(slots, dtype=torch.int32),
        }
        mixed, gates, b, a = self.split(torch.cat(parts))
        prefixes = torch.tensor(have_prefix)
        convolved = on_cpu.convolve_prompts(
            mixed.T, self.weight, None, conv_states=self.windows, has_initial_state=prefixes, **places
        ).T
        sizes = [theirs.key_dim, theirs.key_dim, theirs.value_dim]
        q, k, v = (
            each.unflatten(-1, (-1, size))[None]
            for each, size in zip(
                convolved.split(sizes, dim=-1), (theirs.head_k_dim, theirs.head_k_dim, theirs.head_v_dim), strict=True
            )
        )
        g, beta = on_cpu.gates_of(theirs.A_log, a, b, theirs.dt_bias)
        outputs, _, _ = on_cpu.extend_states(None, q, k, v, g, beta, ssm_states=self.states, **places)
        return list(self.joined(outputs, gates).split(lengths))

    @torch.no_grad()
    def decode(self, tokens: torch.Tensor, slots: list[int]) -> torch.Tensor:
        """Compute one new token of each of several sequences."""
        theirs, places = self.theirs, torch.tensor(slots, dtype=torch.int32)
        mixed, gates, b, a = self.split(tokens)
        convolved = on_cpu.convolve_tokens(mixed, self.windows, self.weight, None, "silu", conv_state_indices=places)
        outputs = on_cpu.decode_tokens(
            None,
            convolved,
            a,
            b,
            A_log=theirs.A_log,
            dt_bias=theirs.dt_bias,
            scale=theirs.head_k_dim**-0.5,
            ssm_states=self.states,
            cache_indices=places,
            num_v_heads=theirs.num_v_heads,
            head_v_dim=theirs.head_v_dim,
        )
        return self.joined(outputs, gates)


def untouched(layer: Layer, slots: list[int]) -> list[torch.Tensor]:
    """What lies in the other slots."""
    others = [number for number in range(NUM_SLOTS) if number not in slots]
    return [layer.windows[others].clone(), layer.states[others].clone()]


@pytest.mark.parametrize("lengths", [[1], [2, 70, 1, 64, 130, 3]], ids=str)
def test_prompts_of_a_batch_and_the_tokens_after_them_are_transformers(lengths: list[int]) -> None:
    """None sees another, or what lay in its slot; slots of others stay as they are."""
    layer = Layer()
    sequences = [layer.inputs(length + 5, seed=number) for number, length in enumerate(lengths)]
    slots = [7, 2, 9, 1, 4, 11][: len(lengths)]
    before = untouched(layer, slots)
    prompts = [sequence[:-5] for sequence in sequences]
    found = layer.extend(prompts, slots, have_prefix=[False] * len(lengths))
    for number in range(-5, 0):
        tokens = layer.decode(torch.stack([sequence[number] for sequence in sequences]), slots)
        found = [torch.cat([one, token[None]]) for one, token in zip(found, tokens, strict=True)]
    for one, sequence in zip(found, sequences, strict=True):
        assert (one - layer.alone(sequence)).abs().max() <= CLOSE
    assert all(torch.equal(*pair) for pair in zip(before, untouched(layer, slots), strict=True))


def test_a_prompt_goes_on_from_its_cached_prefix() -> None:
    """Beside one without; also of fewer tokens than a convolution sees, and from another slot, as SGLang copies it."""
    layer = Layer()
    sequences = [layer.inputs(length, seed=number) for number, length in enumerate((80, 9, 12, 70))]
    layer.extend([sequence[:7] for sequence in sequences[:3]], [3, 5, 8], have_prefix=[False] * 3)
    layer.windows[10], layer.states[10] = layer.windows[5].clone(), layer.states[5].clone()
    parts = [sequences[0][7:], sequences[1][7:], sequences[2][7:8], sequences[3]]
    found = layer.extend(parts, [3, 10, 8, 6], have_prefix=[True, True, True, False])
    found[2] = torch.cat([found[2], *layer.extend([sequences[2][8:]], [8], have_prefix=[True])])
    for one, sequence in zip(found, sequences, strict=True):
        assert (one - layer.alone(sequence)[-len(one) :]).abs().max() <= CLOSE


def test_a_state_of_other_weights_would_be_noticed() -> None:
    """By the size of the difference that the comparisons above must not have."""
    layer = Layer()
    sequence = layer.inputs(40, seed=0)
    layer.extend([sequence[:30]], [3], have_prefix=[False])
    layer.states[3] *= 1.1
    [found] = layer.extend([sequence[30:]], [3], have_prefix=[True])
    assert (found - layer.alone(sequence)[30:]).abs().max() > 1000 * CLOSE


def test_full_attention_is_gated() -> None:
    """By a gate with a dimension for heads, or flat."""
    attended, gate = torch.tensor([[1.0, -2.0, 3.0, 4.0]]), torch.tensor([[[0.0, 1.0], [-1.0, 100.0]]])
    expected = torch.tensor([[0.5, -2 * 0.7310586, 3 * 0.2689414, 4.0]])
    for given in (gate, gate.flatten(1)):
        torch.testing.assert_close(on_cpu.gate_by_sigmoid(attended, given, inplace=True), expected)


def test_decays_are_rounded_as_they_are_loaded() -> None:
    """To the precision of the model, although they are kept in float32."""
    loaded: list[tuple[Any, torch.Tensor]] = []
    parameter = SimpleNamespace(weight_loader=lambda *pair: loaded.append(pair))
    torch.set_default_dtype(torch.bfloat16)
    try:
        round_decay(None, SimpleNamespace(A_log=parameter))
    finally:
        torch.set_default_dtype(torch.float32)
    parameter.weight_loader(parameter, torch.tensor([1.0, 1.001]))
    [(into, value)] = loaded
    assert into is parameter
    assert value.tolist() == [1.0, 1.0]


def test_what_is_derived_from_weights_follows_a_push(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests do not see it, and on CPUs nothing reads it."""
    norm = GemmaRMSNorm(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Sequential(norm))
    monkeypatch.setattr(weight_loader, "trainer_parameters", lambda _: [("norm", Shard(tensor=norm.weight.data))])
    pushed = {"norm": torch.full((3,), 2.0)}
    manifest = Manifest.plan(specs_of(pushed), max_bucket_bytes=1 << 20)
    folder = write_weight_files(tmp_path, 1, manifest, [pack(bucket, pushed) for bucket in manifest.buckets])
    order = weight_loader.LoadOrder(
        bucket_lengths=(1,), transport=DiskTransport(folder=str(folder)), is_direct=True, digest="xxh3"
    )
    updater = SimpleNamespace(get_model=lambda: model, device="cpu", _model_update_group={})
    described = {"names": ["norm"], "dtypes": ["float32"], "shapes": [[3]], "load_format": order.to_load_format()}
    assert weight_loader.load(pytest.fail, updater, **described) == []
    assert norm.weight.tolist() == [2.0] * 3
    assert norm.gemma_weight.tolist() == [3.0] * 3


@pytest.mark.parametrize("cuda", [False, True])
def test_kernels_are_replaced_on_cpus_alone(monkeypatch: pytest.MonkeyPatch, *, cuda: bool) -> None:
    """Decays are rounded on GPUs too."""
    registered: dict[str, HookType] = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(HookRegistry, "register", lambda target, _, kind: registered.update({target: kind}))
    hooks.register()
    of_cpu = [target for target, kind in registered.items() if kind is HookType.REPLACE]
    assert len(of_cpu) == (0 if cuda else 8)
    assert len(registered) == len(of_cpu) + 1
