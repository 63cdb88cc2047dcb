"""The policy's logprobs: as a plain forward pass gives them; weights under the names engines know."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import ConfigError
from penstock.model.parameters import own_parameter_sizes
from penstock.model.tokens import forbidden_token_ids
from penstock.records import Group
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.backend.files.export import named_weights
from services.trainer.backend.in_process import InProcessBackend
from services.trainer.backend.policy import logprobs
from services.trainer.backend.policy.load_model import load_policy
from services.trainer.backend.policy.model import PolicyModel
from services.trainer.batching.images import ImagePatcher
from services.trainer.batching.sequences import GroupReader, ModelTokens, TrainSequence
from services.trainer.config import BackendConfig
from tests.support.trainer.families import random_qwen3_5_text, write_model
from tests.support.trainer.groups import IMAGES, make_group, picture
from tests.support.trainer.read_groups import reader_of
from tests.support.trainer.rows import row_of

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def policy(tiny_model_path: Path) -> PolicyModel:
    """At a temperature that is not 1."""
    return load_policy(tiny_model_path, temperature=TEMPERATURE, forbidden_ids=forbidden_token_ids(tiny_model_path))


@pytest.fixture(scope="module")
def sequences(tiny_model_path: Path) -> list[TrainSequence]:
    """Of different lengths: without image, with one, with two of different sizes, with the same twice."""
    reader = reader_of(tiny_model_path)
    square, wide = picture(0), picture(1, size=(160, 64))
    groups: list[Group] = [
        make_group(tiny_model_path, index=0, own_lengths=[4, 9], rewards=[0, 1]),
        make_group(tiny_model_path, index=1, rewards=[0, 1], images=[square], placeholders=[9]),
        make_group(tiny_model_path, index=2, rewards=[0, 1], images=[wide, square], placeholders=[10, 9]),
        make_group(tiny_model_path, index=3, rewards=[0, 1], images=[square, square], placeholders=[9, 9]),
    ]
    return [sequence for group in groups for sequence in reader.read(group, IMAGES).sequences]


@torch.no_grad()
def test_logprobs_are_those_of_a_plain_forward_pass(
    policy: PolicyModel, sequences: list[TrainSequence], tiny_model_path: Path
) -> None:
    """All logits of the whole model with pixel values, tempered, forbidden ids removed, in float64; and entropies."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(tiny_model_path, dtype=torch.float32)
    for sequence in sequences:
        inputs = {
            "input_ids": torch.from_numpy(sequence.token_ids_X)[None],
            "mm_token_type_ids": torch.from_numpy(sequence.image_mask_X).long()[None],
        }
        if sequence.images:
            inputs["pixel_values"] = torch.cat([image.pixel_values_PD for image in sequence.images])
            inputs["image_grid_thw"] = torch.tensor([image.grid_thw for image in sequence.images])
        logits = model(**inputs).logits[0].double() / TEMPERATURE
        logits[:, policy.forbidden_ids] = -math.inf
        everything = logits.log_softmax(-1)[:-1][torch.from_numpy(sequence.loss_mask_X[1:])]
        expected = everything.gather(1, torch.from_numpy(sequence.token_ids_X[sequence.loss_mask_X])[:, None])[:, 0]
        found = policy(row_of(sequence))
        torch.testing.assert_close(found.logprobs_N.double(), expected, rtol=0, atol=1e-5)
        entropy = torch.special.entr(everything.exp()).sum(-1)
        torch.testing.assert_close(found.entropy_N.double(), entropy, rtol=0, atol=1e-5)


@torch.no_grad()
def test_forbidden_ids_have_no_share_of_the_probability(policy: PolicyModel, sequences: list[TrainSequence]) -> None:
    """Without the mask every logprob is lower."""
    free = PolicyModel(policy.model, temperature=TEMPERATURE, forbidden_ids=())
    row = row_of(*sequences)
    assert bool((policy(row).logprobs_N > free(row).logprobs_N).all())


def test_weights_carry_the_names_of_the_checkpoint(policy: PolicyModel, tiny_model_path: Path) -> None:
    """Every tensor of the file, vision tower included, the tied head once."""
    from safetensors import safe_open

    with safe_open(tiny_model_path / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        ours = dict(named_weights(policy))
        assert set(ours) == names - {"lm_head.weight"}
        assert any(name.startswith("model.visual.") for name in ours)
        assert all(torch.equal(ours[name], file.get_tensor(name)) for name in ours)


def test_text_only_models_work_too(tmp_path: Path) -> None:
    """A Qwen3 without images: same logprobs as a plain forward pass."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        attention_dropout=0.5,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    policy = load_policy(tmp_path, temperature=1.0, forbidden_ids=())
    tokens = ModelTokens(vocab_size=256, image_id=None, forbidden_ids=frozenset())
    group = make_group(tmp_path, rewards=[0.0, 1.0])
    sequence = GroupReader(tokens, None).read(group, {}).sequences[0]
    sequence.token_ids_X[:] %= 64
    ids = torch.from_numpy(sequence.token_ids_X)[None]
    plain = Qwen3ForCausalLM.from_pretrained(tmp_path, attention_dropout=0.0)
    with torch.no_grad():
        expected = plain(ids).logits[0].log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
        found = policy(row_of(sequence)).logprobs_N
    torch.testing.assert_close(found, expected[torch.from_numpy(sequence.loss_mask_X[1:])], rtol=0, atol=1e-5)
    assert "lm_head.weight" in dict(named_weights(policy))


def test_refuses_models_whose_packed_rows_are_not_tested() -> None:
    """Instead of training on other positions, logits or experts than the engine's."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1}
    text = {**sizes, "model_type": "llama", "num_key_value_heads": 2, "vocab_size": 64}
    vision = {**sizes, "model_type": "clip_vision_model", "image_size": 32, "patch_size": 16}
    model = LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision, image_token_index=1))
    with pytest.raises(ConfigError, match=r"models of type llava cannot be trained .* choose one of type .*qwen3_vl"):
        PolicyModel(model, temperature=1.0, forbidden_ids=())


def test_a_draft_head_of_the_checkpoint_is_left_alone(tmp_path: Path) -> None:
    """As published Qwen3.5 has one: it is neither loaded nor counted."""
    from safetensors.torch import load_file, save_file

    path = write_model(random_qwen3_5_text(), tmp_path / "m")
    file = path / "model.safetensors"
    save_file({**load_file(file), "mtp.fc.weight": torch.zeros(2, 2)}, file, metadata={"format": "pt"})
    policy = load_policy(path, temperature=1.0, forbidden_ids=())
    assert {name: tensor.numel() for name, tensor in named_weights(policy)} == own_parameter_sizes(path)


def test_refuses_a_folder_without_a_model(tmp_path: Path) -> None:
    """One line that names the folder."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"model\.path .* cannot be loaded"):
        load_policy(tmp_path, temperature=1.0, forbidden_ids=())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "has quantized weights, which cannot be trained"),
        ({"text_config": {"intermediate_size": "many"}}, "cannot be loaded"),
        ({"text_config": {"intermediate_size": 48}}, "cannot be loaded|of the checkpoint|in the checkpoint"),
    ],
    ids=["quantized", "no number", "another size"],
)
@pytest.mark.parametrize("with_weights", [True, False], ids=["one rank", "ranks"])
def test_refuses_a_config_that_fits_no_weights(
    change: dict[str, Any], reason: str, with_weights: bool, tiny_model_path: Path, tmp_path: Path
) -> None:
    """One line that names the setting."""
    shutil.copytree(tiny_model_path, tmp_path / "m")
    file = tmp_path / "m" / "config.json"
    config = json.loads(file.read_text())
    for name, value in change.items():
        config[name] = {**config.get(name, {}), **value}
    file.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=rf"model\.path '{tmp_path}.*({reason})"):
        load_policy(tmp_path / "m", temperature=1.0, forbidden_ids=(), with_weights=with_weights)


def test_a_config_that_says_it_has_no_quantization_is_fine(tiny_model_path: Path, tmp_path: Path) -> None:
    """As some tools write it."""
    shutil.copytree(tiny_model_path, tmp_path / "m")
    file = tmp_path / "m" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": None}))
    load_policy(tmp_path / "m", temperature=1.0, forbidden_ids=())


def test_refuses_a_checkpoint_that_is_cut_short(tiny_model_path: Path, tmp_path: Path) -> None:
    """The file is named: a copy that was interrupted."""
    shutil.copytree(tiny_model_path, tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    for size in (file.stat().st_size // 2, 100, 0):
        file.write_bytes(file.read_bytes()[:size])
        with pytest.raises(ConfigError, match=rf"model\.path: {file} is not a complete safetensors file"):
            load_policy(tmp_path / "m", temperature=1.0, forbidden_ids=())


def test_refuses_a_folder_without_an_image_processor(tiny_model_path: Path, tmp_path: Path) -> None:
    """One line that names the folder and the file."""
    (tmp_path / "config.json").write_text((tiny_model_path / "config.json").read_text())
    with pytest.raises(ConfigError, match=rf"model\.path '{tmp_path}'.*preprocessor_config\.json"):
        ImagePatcher(tmp_path)


def test_refuses_a_checkpoint_with_other_names(tiny_model_path: Path, tmp_path: Path) -> None:
    """Such weights could not be pushed; better known before the first step than after it."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny_model_path, tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    save_file({**load_file(file), "model.unknown": torch.zeros(1)}, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"1 of the checkpoint are not in the model \(such as \['model.unknown'\]\)"):
        load_policy(tmp_path / "m", temperature=1.0, forbidden_ids=())


@pytest.fixture(scope="module")
def older_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2.5-VL, whose checkpoint has older names than transformers."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    text = {**sizes, "num_hidden_layers": 1, "vocab_size": 64, "tie_word_embeddings": False}
    vision = {"depth": 1, "hidden_size": 16, "out_hidden_size": 16, "intermediate_size": 24, "num_heads": 2}
    path = tmp_path_factory.mktemp("qwen2_5_vl")
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(path)
    return path


def test_weights_are_pushed_under_transformers_names(older_model_path: Path) -> None:
    """Engines know only these, also for a model whose checkpoint has older names."""
    loaded = load_policy(older_model_path, temperature=1.0, forbidden_ids=())
    names = [name for name, _ in named_weights(loaded)]
    assert names == [name for name, _ in loaded.model.named_parameters()]
    assert any(name.startswith("model.visual.") for name in names)


@torch.no_grad()
@pytest.mark.parametrize("chunk", [1000, 100], ids=["whole", "chunks"])
def test_a_recipes_float32_head_multiplies_in_float32(
    tiny_model_path: Path, sequences: list[TrainSequence], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a bfloat16 trainer: the hidden states are bfloat16's, what the head computes of them is float32's."""
    monkeypatch.setattr(logprobs, "CHUNK_IDS", chunk)
    monkeypatch.setattr(logprobs, "CHUNK_TOKENS", chunk // 20)
    row, said = row_of(*sequences), {}
    for float32_head in (False, True):
        config = BackendConfig(device="cpu", dtype="bfloat16", float32_head=float32_head)
        backend = InProcessBackend(tiny_model_path, config, AlgorithmConfig(), seed=0, temperature=TEMPERATURE)
        backend.load(None)
        outputs: list[Any] = []
        model = backend.policy.model
        model.base_model.language_model.register_forward_hook(lambda *call, to=outputs: to.append(call[-1]))
        said[float32_head] = backend._model.logprobs(row).logprobs_N
    hidden_NH = outputs[0].last_hidden_state[0][row.predict_N]
    weight_VH = model.get_output_embeddings().weight
    assert hidden_NH.dtype == weight_VH.dtype == torch.bfloat16
    logits_NV = hidden_NH.float() @ weight_VH.float().T / TEMPERATURE
    logits_NV[:, [*forbidden_token_ids(tiny_model_path)]] = -math.inf
    expected_N = logits_NV.log_softmax(-1).gather(1, row.targets_N[:, None])[:, 0]
    torch.testing.assert_close(said[True], expected_N, rtol=0, atol=1e-5)
    assert float((said[False] - expected_N).abs().max()) > 1e-3
