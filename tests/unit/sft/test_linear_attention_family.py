"""Supervised training of a family whose layers attend linearly: rows of several samples, and what is written."""

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import ConfigError
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.backend.in_process import InProcessBackend
from services.trainer.backend.policy.load_model import load_policy
from services.trainer.backend.ranks.start import open_supervised_ranks
from services.trainer.backend.supervised import InProcessSupervisedBackend
from services.trainer.batching.sequences import TrainSequence
from services.trainer.config import LoraConfig, OptimizerConfig, TrainerConfig
from services.trainer.sft.sequences import DemonstrationReader
from tests.support.trainer.data.pictures import png
from tests.support.trainer.data.sft import demonstration
from tests.support.trainer.families import heard, random_qwen3_5, write_model


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with a vision tower."""
    return write_model(heard(random_qwen3_5(), std_of_embedding=0.3), tmp_path_factory.mktemp("models") / "qwen3_5")


@pytest.fixture(scope="module")
def sequences(path: Path) -> list[TrainSequence]:
    """Text, a long answer, several answers, and pictures."""
    reader = DemonstrationReader.open(path)
    examples = [
        demonstration("Say five.", "five, of course"),
        demonstration("Count.", " ".join(map(str, range(30)))),
        demonstration("<image>or<image>?", "the first", images=[png(size=(64, 96)), png("blue", size=(96, 96))]),
        demonstration("Say one.", "one", "And two?", "two"),
    ]
    return [reader.read(example) for example in examples]


def settings(**changed: Any) -> TrainerConfig:
    """Steps that are large enough to be seen."""
    optimizer = OptimizerConfig(learning_rate=1e-3, grad_clip=1e6)
    return TrainerConfig(**{"device": "cpu", "optimizer": optimizer, **changed})


def backend_of(path: Path, **changed: Any) -> InProcessSupervisedBackend:
    """One that has loaded the model."""
    backend = InProcessSupervisedBackend(path, settings(**changed), seed=0)
    backend.load(None)
    return backend


def test_a_row_of_several_samples_has_the_loss_and_gradient_of_each_alone(
    path: Path, sequences: list[TrainSequence]
) -> None:
    """As transformers computes one sample at a time: none sees its neighbours."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    losses = []
    for sequence in sequences:
        ids = torch.from_numpy(sequence.token_ids_X)[None]
        inputs = {"mm_token_type_ids": torch.from_numpy(sequence.image_mask_X).long()[None]}
        if sequence.images:
            inputs["pixel_values"] = torch.cat([image.pixel_values_PD for image in sequence.images])
            inputs["image_grid_thw"] = torch.tensor([image.grid_thw for image in sequence.images])
        labels = torch.where(torch.from_numpy(sequence.loss_mask_X)[None], ids, -100)
        losses.append(model(input_ids=ids, labels=labels, **inputs).loss * sequence.num_own_tokens)
    loss = sum(losses) / sum(sequence.num_own_tokens for sequence in sequences)
    loss.backward()
    norm = sum(float(each.grad.square().sum()) for each in model.parameters() if each.grad is not None) ** 0.5
    for row_tokens in (10_000, 1):
        metrics = backend_of(path, micro_batch_tokens=row_tokens).step(sequences)
        assert metrics["loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_training_goes_on_from_what_was_written(path: Path, sequences: list[TrainSequence], tmp_path: Path) -> None:
    """To the bit, with activations that are computed again; and the model's folder has what was learned."""
    whole = backend_of(path, gradient_checkpointing=True)
    losses = [whole.step(sequences)["loss"] for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    broken = backend_of(path, gradient_checkpointing=True)
    for _ in range(2):
        broken.step(sequences)
    broken.save(tmp_path)
    resumed = backend_of(path, gradient_checkpointing=True)
    resumed.load(tmp_path)
    assert [resumed.step(sequences)["loss"] for _ in range(2)] == losses[2:]
    again = backend_of(tmp_path / "model")
    assert again.measure(sequences).mean == pytest.approx(losses[2], abs=1e-6)


def test_a_step_in_half_precision_is_that_in_float32_but_for_rounding(
    path: Path, sequences: list[TrainSequence]
) -> None:
    """Weights and activations are rounded, states are not."""
    exact, rounded = (backend_of(path, dtype=dtype).step(sequences) for dtype in ("float32", "bfloat16"))
    assert rounded["loss"] == pytest.approx(exact["loss"], rel=2e-2)
    assert rounded["grad_norm"] == pytest.approx(exact["grad_norm"], rel=5e-2)


def test_backends_refuse_what_linear_attention_does_not_go_with(path: Path) -> None:
    """Also where nothing has compared the recipe with the model before."""
    arguments = {"model_path": path, "config": settings(), "seed": 0}
    with pytest.raises(ConfigError, match=r"trainer\.sequence_parallel = 2 does not go with linear attention"):
        open_supervised_ranks({**arguments, "sequence_parallel": 2}, num_ranks=2)
    with pytest.raises(ConfigError, match=r"trainer\.compile = true does not go with linear attention"):
        load_policy(path, temperature=1.0, forbidden_ids=(), is_compiled=True)
    adapted = settings(lora=LoraConfig(rank=2))
    with pytest.raises(ConfigError, match=r"trainer\.lora\.rank = 2 does not go with linear attention"):
        InProcessBackend(path, adapted, AlgorithmConfig(), seed=0, temperature=1.0)
