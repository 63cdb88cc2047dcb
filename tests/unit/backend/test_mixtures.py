"""Mixtures of experts: read and written as they are published, trained, and continued."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from penstock.errors import ConfigError
from services.trainer.backend.policy.load_model import load_policy
from services.trainer.backend.ranks.ranks import ALONE
from tests.support.trainer.mixtures import MIXTURES, heard, published, random_qwen3_vl_moe, write_mixture
from tests.unit.backend.ranks.test_ranks import backend_of, steps_of


@pytest.fixture(params=MIXTURES)
def model(request: pytest.FixtureRequest) -> Any:
    """In transformers' memory."""
    return heard(MIXTURES[request.param]())


def test_a_published_mixture_is_read(model: Any, tmp_path: Path) -> None:
    """Each expert's matrices the right way round."""
    policy = load_policy(write_mixture(model, tmp_path / "model"), temperature=1.0, forbidden_ids=())
    read = dict(policy.model.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(read[name], parameter), name


def test_what_is_written_is_as_published(model: Any, tmp_path: Path) -> None:
    """So transformers and SGLang read it; and a run continues from it."""
    path = write_mixture(model, tmp_path / "model")
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


def test_a_mixture_of_which_nobody_can_tell_how_it_lies_is_refused(tmp_path: Path) -> None:
    """transformers would take a published matrix of equal sizes as it is."""
    hidden = random_qwen3_vl_moe().config.text_config.hidden_size
    model = random_qwen3_vl_moe(moe_intermediate_size=hidden)  # down_proj is square
    path = write_mixture(model, tmp_path / "model")
    with pytest.raises(ConfigError, match=rf"down_proj has the shape \[6, {hidden}, {hidden}\].* choose a model"):
        load_policy(path, temperature=1.0, forbidden_ids=())
