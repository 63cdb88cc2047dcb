"""Steps that train adapters alone: gradients, the base as reference, checkpoints, and what is written for others."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.errors import ConfigError, SetupError
from penstock.model.tokens import forbidden_token_ids
from penstock.weights.adapter_names import is_adapter
from penstock.weights.adapters import change_of, merged
from penstock.weights.digest import XXH3, tensor_digest
from services.cli import main
from services.cli.model_folder import find_model
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.backend.base import take_step
from services.trainer.backend.files import checkpoint_share
from services.trainer.backend.in_process import InProcessBackend
from services.trainer.backend.policy.adapters import AdaptedLinear, add_adapters
from services.trainer.backend.policy.load_model import load_policy
from services.trainer.batching.rows import PackedRow
from services.trainer.batching.sequences import TrainGroup
from services.trainer.config import LoraConfig, TrainerConfig
from tests.support.trainer.checkpoints import averages_of, tensors_of
from tests.support.trainer.families import FAMILIES, write_model
from tests.support.trainer.read_groups import groups_with_pictures
from tests.support.trainer.rows import row_of

LORA = {"rank": 4, "alpha": 8.0, "targets": ["text", "tower"]}


def backend_of(
    path: Path, checkpoint: Path | None = None, *, kl: str = "none", lora: dict[str, Any] = LORA, **settings: Any
) -> InProcessBackend:
    """One that trains adapters, on the CPU."""
    config = TrainerConfig.model_validate(
        {"device": "cpu", "optimizer": {"learning_rate": 1e-2}, "lora": lora, **settings}
    )
    algorithm = AlgorithmConfig.model_validate({"kl": {"kind": kl}})
    backend = InProcessBackend(path, config, algorithm, seed=0, temperature=1.0)
    backend.load(checkpoint)
    return backend


@pytest.fixture(scope="module")
def groups(tiny_model_path: Path) -> list[TrainGroup]:
    """Two with a picture and a signal."""
    return groups_with_pictures(tiny_model_path, rewards=[(1.0, 0.0, 0.0, 1.0)] * 2, versions=[1, 1])


@pytest.fixture(scope="module")
def row(groups: list[TrainGroup]) -> PackedRow:
    """All samples of a group."""
    return row_of(*groups[0].sequences)


def adapters(backend: InProcessBackend) -> dict[str, torch.Tensor]:
    """What an engine would get, copied."""
    return {name: tensor.clone() for name, tensor in backend.export()}


def policy_of(path: Path) -> Any:
    """The model without adapters."""
    return load_policy(path, temperature=1.0, forbidden_ids=forbidden_token_ids(path))


def drawn(policy: Any) -> None:
    """Give B values, so that every gradient is heard."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if is_adapter(name):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)


class Textbook(torch.nn.Module):
    """A layer with an adapter as the paper writes it: W x + alpha / r * B A x, with torch's own gradient."""

    def __init__(self, layer: AdaptedLinear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        plain = torch.nn.functional.linear(x, self.layer.weight, self.layer.bias)
        thin = torch.nn.functional.linear(x, self.layer.lora_A.weight)
        return plain + self.layer.scale * torch.nn.functional.linear(thin, self.layer.lora_B.weight)


def test_loss_and_gradient_are_those_of_the_textbook(tiny_model_path: Path, row: PackedRow) -> None:
    """Of every adapter, in language model and tower; nothing else has a gradient."""
    results = []
    for is_textbook in (False, True):
        policy = policy_of(tiny_model_path)
        names = add_adapters(policy.model, LoraConfig.model_validate(LORA))
        drawn(policy)
        if is_textbook:
            for name in names:
                owner, _, last = name.rpartition(".")
                setattr(policy.model.get_submodule(owner), last, Textbook(policy.model.get_submodule(name)))
        logprobs = policy(row).logprobs_N
        (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
        found = {name.replace(".layer.", "."): each.grad for name, each in policy.model.named_parameters()}
        results.append((logprobs, {name: grad for name, grad in found.items() if grad is not None}))
    (ours, our_grads), (theirs, their_grads) = results
    assert (ours - theirs).abs().max() < 1e-5
    assert our_grads.keys() == their_grads.keys()
    assert all(map(is_adapter, our_grads))
    assert any("visual" in name for name in our_grads)
    for name, grad in their_grads.items():
        assert grad.abs().max() > 0, f"{name} has no gradient: the test proves nothing"
        assert torch.allclose(our_grads[name], grad, rtol=1e-3, atol=1e-5 * float(grad.abs().max())), name


def test_bfloat16_computes_with_the_matrix_that_engines_merge(tiny_model_path: Path, row: PackedRow) -> None:
    """The base is rounded, all of it, then the sum: a plain model with these weights gives the same bits."""
    backend = backend_of(tiny_model_path, dtype="bfloat16")
    drawn(backend.policy)
    plain = policy_of(tiny_model_path)
    pushed = adapters(backend)
    weights = dict(plain.model.named_parameters())
    with torch.no_grad():
        for weight in weights.values():
            weight.data = weight.bfloat16()
        for name in filter(lambda each: each.endswith("lora_A.weight"), pushed):
            layer = name.removesuffix(".lora_A.weight")
            change = change_of(pushed[name], pushed[f"{layer}.lora_B.weight"])
            weights[f"{layer}.weight"].copy_(merged(weights[f"{layer}.weight"], change))
        with torch.autocast("cpu", torch.bfloat16):
            expected, got = plain(row).logprobs_N, backend.policy(row).logprobs_N
    assert torch.equal(got, expected)
    for name, parameter in backend.policy.model.named_parameters():
        assert parameter.dtype == (torch.float32 if is_adapter(name) else torch.bfloat16), name


def test_the_reference_is_the_base(tiny_model_path: Path, groups: list[TrainGroup], row: PackedRow) -> None:
    """To the bit, after steps have moved the policy, without a copy of the model."""
    backend = backend_of(tiny_model_path, kl="k3")
    first = take_step(backend, [groups], 1)
    assert first["kl_reference"] == pytest.approx(0, abs=1e-6)
    take_step(backend, [groups], 2)
    third = take_step(backend, [groups], 3)
    assert abs(third["kl_reference"]) > 1e-4
    with torch.no_grad():
        expected = policy_of(tiny_model_path)(row).logprobs_N
        moved = backend.policy(row).logprobs_N
    assert backend._reference is not None
    [reference] = backend._reference.logprobs([row])
    assert torch.equal(reference, expected)
    assert not torch.equal(moved, expected)
    assert all(map(is_adapter, backend._reference.shards))


def test_a_push_carries_adapters_and_names_its_base(tiny_model_path: Path, groups: list[TrainGroup]) -> None:
    """Merged into the model they give the policy's log-probabilities; the base's digests are of every weight."""
    backend = backend_of(tiny_model_path)
    take_step(backend, [groups], 1)
    exported = backend.export()
    pushed = adapters(backend)
    assert {spec.name for spec in exported.specs} == set(pushed)
    assert all(map(is_adapter, pushed))
    plain = policy_of(tiny_model_path)
    weights = dict(plain.model.named_parameters())
    assert exported.base_digests == {name: tensor_digest(weight, XXH3) for name, weight in weights.items()}
    with torch.no_grad():
        for name in filter(lambda each: each.endswith("lora_A.weight"), pushed):
            layer = name.removesuffix(".lora_A.weight")
            weights[f"{layer}.weight"].add_(pushed[f"{layer}.lora_B.weight"] @ pushed[name])
        sequence = row_of(*groups[1].sequences)
        assert (plain(sequence).logprobs_N - backend.policy(sequence).logprobs_N).abs().max() < 1e-5


def test_a_run_continues_bit_for_bit_from_its_adapters(
    tiny_model_path: Path, groups: list[TrainGroup], tmp_path: Path
) -> None:
    """The checkpoint has adapters, their averages and the reference, no model, and is as small."""
    backend = backend_of(tiny_model_path, kl="k3")
    for version in (1, 2):
        take_step(backend, [groups], version)
    (tmp_path / "saved").mkdir()
    written = backend.save(tmp_path / "saved")
    assert not (tmp_path / "saved" / "model").exists()
    assert {"adapter/adapter_model.safetensors", "adapter/adapter_config.json"} <= written.keys()
    assert set(averages_of(tmp_path / "saved")) == set(adapters(backend))
    assert all(map(is_adapter, tensors_of(tmp_path / "saved" / "reference")))
    resumed = backend_of(tiny_model_path, tmp_path / "saved", kl="k3")
    assert resumed.digests() == backend.digests()
    ends = [(take_step(each, [groups], 3)["loss"], each.digests()) for each in (backend, resumed)]
    assert ends[0] == ends[1]


def test_a_checkpoint_of_other_weights_is_refused(
    tiny_model_path: Path, groups: list[TrainGroup], tmp_path: Path
) -> None:
    """One line: which of base, rank, layers or kind of run is another, and what to do."""
    for name, lora in (("adapters", LORA), ("whole", {})):
        (tmp_path / name).mkdir()
        backend_of(tiny_model_path, lora=lora).save(tmp_path / name)
    other = write_model(FAMILIES["qwen3_vl"](), tmp_path / "other")
    adapted = tmp_path / "adapters"
    for path, checkpoint, lora, error, message in (
        (tiny_model_path, adapted, {}, ConfigError, "holds adapters alone, and trainer.lora.rank is 0"),
        (tiny_model_path, tmp_path / "whole", LORA, ConfigError, "has whole weights, and trainer.lora.rank = 4"),
        (tiny_model_path, adapted, {**LORA, "alpha": 9.0}, ConfigError, "rank 4 and alpha 8, the recipe rank 4 and al"),
        (tiny_model_path, adapted, {**LORA, "targets": ["text"]}, ConfigError, "adapters for other layers"),
        (other, adapted, LORA, SetupError, "holds another model than the one whose adapters"),
    ):
        with pytest.raises(error, match=message):
            backend_of(path, checkpoint, lora=lora)


def test_what_does_not_go_with_adapters_is_refused(tiny_model_path: Path, tmp_path: Path) -> None:
    """Before anything is trained."""
    with pytest.raises(ValueError, match=r"adapters \(lora\.rank = 4\) are small; leave it out"):
        TrainerConfig.model_validate({"lora": {"rank": 4}, "optimizer": {"offload": True}})
    with pytest.raises(ValueError, match="targets has no effect without adapters; set rank"):
        LoraConfig(targets=("tower",))
    with pytest.raises(ConfigError, match=r"no linear layer fits 'lm_head'.*q_proj.*Output head, .* take no adapter"):
        backend_of(tiny_model_path, lora={"rank": 4, "targets": ["lm_head"]})
    mixture = write_model(FAMILIES["qwen3_moe"](), tmp_path / "mixture")
    with pytest.raises(ConfigError, match=r"no linear layer fits 'gate_up_proj'.*experts and their routers take no"):
        backend_of(mixture, lora={"rank": 4, "targets": ["gate_up_proj"]})
    algorithm = AlgorithmConfig.model_validate({"kl": {"kind": "k3", "reference": str(tiny_model_path)}})
    config = TrainerConfig.model_validate({"device": "cpu", "lora": LORA})
    with pytest.raises(ConfigError, match=r"algorithm\.kl\.reference = .* does not go with trainer\.lora\.rank = 4"):
        InProcessBackend(tiny_model_path, config, algorithm, seed=0, temperature=1.0)
    algorithm = AlgorithmConfig.model_validate({"kl": {"kind": "k3", "refresh": "ema"}})
    with pytest.raises(ConfigError, match=r"algorithm\.kl\.refresh = 'ema' does not go with trainer\.lora\.rank = 4"):
        InProcessBackend(tiny_model_path, config, algorithm, seed=0, temperature=1.0)


def test_large_adapters_are_one_file(tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT reads no others."""
    monkeypatch.setattr(checkpoint_share, "MAX_FILE_BYTES", 1000)
    backend_of(tiny_model_path).save(tmp_path)
    assert [file.name for file in (tmp_path / "adapter").glob("*.safetensors")] == ["adapter_model.safetensors"]


@pytest.mark.parametrize("family", ["qwen3", "qwen2_5_vl"])
def test_an_export_is_the_policy(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`penstock export` merges into the published names; every weight is the policy's, in float32 to the bit."""
    model = write_model(FAMILIES[family](), tmp_path / "model")
    lora = {"rank": 2, "targets": ["q_proj", "*.layers.1.*.down_proj"]}
    backend = backend_of(model, lora=lora)
    drawn(backend.policy)
    (tmp_path / "saved").mkdir()
    backend.save(tmp_path / "saved")
    stored = load_file(tmp_path / "saved" / "adapter" / "adapter_model.safetensors")
    assert {name.removeprefix("base_model.model.") for name in stored} == set(adapters(backend))
    config = json.loads((tmp_path / "saved/adapter/adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, 32.0)
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "out"), "--dtype=float32"]) == 0
    exported = dict(policy_of(tmp_path / "out").model.named_parameters())
    pushed, num_changed = adapters(backend), 0
    for name, weight in policy_of(model).model.named_parameters():
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A.weight" in pushed:
            change = change_of(pushed[f"{layer}.lora_A.weight"], pushed[f"{layer}.lora_B.weight"])
            weight, num_changed = merged(weight, change), num_changed + 1
        assert torch.equal(exported[name], weight), name
    assert num_changed == len(pushed) / 2 > 1
    cut = list(stored)
    for number, names in enumerate((cut[::2], cut[1::2]), 1):  # as earlier releases wrote large ones
        save_file(
            {each: stored[each] for each in names}, tmp_path / f"saved/adapter/adapter_model-{number}.safetensors"
        )
    (tmp_path / "saved/adapter/adapter_model.safetensors").unlink()
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "of two"), "--dtype=float32"]) == 0
    for name, weight in policy_of(tmp_path / "of two").model.named_parameters():
        assert torch.equal(exported[name], weight), name
    model.rename(tmp_path / "moved")
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "again")]) == 2
    assert "name it with --base" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "again"), f"--base={tmp_path / 'moved'}"]) == 0
    other = write_model(FAMILIES["qwen3_vl"](), tmp_path / "other")
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "third"), f"--base={other}"]) == 2
    assert "is not the base of" in capsys.readouterr().err
    with pytest.raises(
        ConfigError, match=r"--model .*/saved holds adapters alone .trainer\.lora.; write the whole model"
    ):
        find_model(tmp_path / "saved")
