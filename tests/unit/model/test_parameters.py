"""Parameters of a model's files, under the names that they have once the model is loaded."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from penstock.model.parameters import own_parameter_sizes
from tests.support.trainer.families import FAMILIES, write_model


@pytest.mark.parametrize("kind", list(FAMILIES))
def test_names_and_sizes_are_those_of_the_loaded_model(kind: str, tmp_path: Path) -> None:
    """Of every family, experts of mixtures included; a copy of the embedding as the head counts where it is untied."""
    model = FAMILIES[kind]()
    path = write_model(model, tmp_path / kind)
    expected = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert own_parameter_sizes(path) == expected
    tensors = load_file(path / "model.safetensors")
    embedding = next(tensor for name, tensor in tensors.items() if "embed_tokens" in name)
    save_file(tensors | {"lm_head.weight": embedding.clone()}, path / "model.safetensors")
    assert own_parameter_sizes(path) == expected


def test_a_folder_without_weights_has_no_parameters(tmp_path: Path) -> None:
    """Workers' machines may have the tokenizer alone."""
    assert own_parameter_sizes(tmp_path) == {}
