"""Mixtures of experts: read and written as they are published, trained, and continued."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from penstock.errors import ConfigError
from services.trainer.backend.policy.experts.mixture import set_mixture_precision
from services.trainer.backend.policy.load_model import load_policy
from services.trainer.backend.ranks.ranks import ALONE
from tests.support.trainer.families import MIXTURES, heard, published, random_qwen3_vl_moe, write_model
from tests.support.trainer.grouped_products import count_grouped_products
from tests.unit.backend.ranks.test_ranks import backend_of, steps_of


@pytest.fixture(params=MIXTURES)
def model(request: pytest.FixtureRequest) -> Any:
    """In transformers' memory."""
    return heard(MIXTURES[request.param]())


def test_a_published_mixture_is_read(model: Any, tmp_path: Path) -> None:
    """Each expert's matrices the right way round."""
    policy = load_policy(write_model(model, tmp_path / "model"), temperature=1.0, forbidden_ids=())
    read = dict(policy.model.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(read[name], parameter), name


def test_what_is_written_is_as_published(model: Any, tmp_path: Path) -> None:
    """So transformers and SGLang read it; and a run continues from it."""
    path = write_model(model, tmp_path / "model")
    backend = backend_of(ALONE, path)
    steps_of(backend, path, [0])
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    backend.save(folder)
    trained = dict(backend.export())
    assert all(not torch.equal(trained[name], before) for name, before in model.named_parameters() if "experts" in name)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(trained[name])
    written: dict[str, torch.Tensor] = {}
    for file in (folder / "model").glob("*.safetensors"):
        written |= load_file(file)
    expected = dict(published(model))
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(written[name], tensor), name
    assert backend_of(ALONE, path, folder).digests() == backend.digests()


def part_of(model: Any, name: str) -> Any:
    """The first module of a class whose name ends so."""
    return next(part for part in model.modules() if type(part).__name__.endswith(name))


def test_tokens_are_routed_by_float32_scores(model: Any) -> None:
    """Rounded to bfloat16, scores that are nearly equal would choose other experts."""
    router = part_of(model, "TopKRouter")
    hidden = torch.randn(4000, router.hidden_dim, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = (hidden.double() @ router.weight.bfloat16().double().T).topk(router.top_k).indices

    def num_other() -> int:
        with torch.autocast("cpu", torch.bfloat16):
            _, weights, experts = router(hidden)
        assert weights.dtype is torch.bfloat16
        return int((experts != exact).sum())

    assert num_other() > 10
    set_mixture_precision(model)
    assert num_other() == 0


def test_experts_compute_in_the_precision_of_the_rest(model: Any) -> None:
    """As experts with rounded weights do; autocast by itself leaves their grouped product in float32."""
    experts = part_of(model, "Experts")
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(50, experts.hidden_dim, generator=generator)
    chosen = torch.rand(50, experts.num_experts, generator=generator).topk(2).indices
    weights = torch.full((50, 2), 0.5).bfloat16()
    set_mixture_precision(model)
    with torch.autocast("cpu", torch.bfloat16):
        got = experts(hidden, chosen, weights)
    rounded = copy.deepcopy(experts).bfloat16()
    assert got.dtype is torch.bfloat16
    assert torch.equal(got, rounded(hidden.bfloat16(), chosen, weights))


@pytest.mark.parametrize("implementation", [None, "eager"])
def test_all_experts_of_a_layer_are_computed_at_once(model: Any, tmp_path: Path, implementation: str | None) -> None:
    """By two grouped products, and by no loop over experts, also if the model's config asks for one."""
    path = write_model(model, tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    for part in (config, config.get("text_config", config)):
        part["experts_implementation"] = implementation
    (path / "config.json").write_text(json.dumps(config))
    backend = backend_of(ALONE, path)
    counts = count_grouped_products(backend)
    steps_of(backend, path, [0])
    assert set(counts) == {2 * model.config.get_text_config().num_hidden_layers}


def test_a_step_in_bfloat16_is_near_the_one_in_float32(model: Any, tmp_path: Path) -> None:
    """The whole of it runs."""
    path = write_model(model, tmp_path / "model")
    made = [steps_of(backend_of(ALONE, path, dtype=dtype), path, [0]) for dtype in ("float32", "bfloat16")]
    [exact], [rounded] = made
    assert rounded["loss"] == pytest.approx(exact["loss"], abs=5e-3)
    assert rounded["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.2)


def test_a_mixture_with_square_experts_is_refused(tmp_path: Path) -> None:
    """transformers would take a published matrix of equal sizes as it is."""
    hidden = random_qwen3_vl_moe().config.text_config.hidden_size
    model = random_qwen3_vl_moe(moe_intermediate_size=hidden)  # down_proj is square
    path = write_model(model, tmp_path / "model")
    with pytest.raises(ConfigError, match=rf"down_proj is square \(\[6, {hidden}, {hidden}\]\).* choose one"):
        load_policy(path, temperature=1.0, forbidden_ids=())


def test_a_mixture_that_transformers_wrote_is_refused(tmp_path: Path) -> None:
    """It lies there as in memory, which transformers reads and engines do not."""
    model = random_qwen3_vl_moe()
    path = write_model(model, tmp_path / "model")
    model.save_pretrained(path)
    with pytest.raises(ConfigError, match=r"in the checkpoint and .* as published, which is what engines load"):
        load_policy(path, temperature=1.0, forbidden_ids=())
