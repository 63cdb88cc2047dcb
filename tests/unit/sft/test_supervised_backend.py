"""Supervised steps: loss and gradient of plain cross-entropy, however samples are packed, with and without images."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from services.trainer.backend.base import TokenLoss
from services.trainer.backend.supervised import InProcessSupervisedBackend
from services.trainer.batching.sequences import TrainSequence
from services.trainer.config import OptimizerConfig, TrainerConfig
from services.trainer.data.config import DataConfig
from services.trainer.data.sources.opening import built_in
from services.trainer.data.sources.source import DEMONSTRATIONS
from services.trainer.sft.sequences import DemonstrationReader
from tests.support.trainer.checkpoints import averages_of
from tests.support.trainer.data.pictures import png
from tests.support.trainer.data.sft import demonstration


@pytest.fixture(scope="module")
def sequences(tiny_model_path: Path) -> list[TrainSequence]:
    """Two of the built-in problems, one with two pictures, and two of text alone, one of them of two answers."""
    reader = DemonstrationReader.open(tiny_model_path)
    built = built_in(DataConfig(answer_format=r"\boxed{{answer}}"), form=DEMONSTRATIONS)
    examples = [
        built[0],
        demonstration("Say five.", "five, of course"),
        built[1],
        demonstration("<image>or<image>?", "the first", images=[png(size=(64, 96)), png("blue", size=(96, 96))]),
        demonstration("Say one.", "one", "And two?", "two"),
    ]
    return [reader.read(example) for example in examples]


def backend_of(path: Path, **settings: Any) -> InProcessSupervisedBackend:
    """One that has loaded the model, with steps that are large enough to be seen."""
    optimizer = OptimizerConfig(learning_rate=1e-3, grad_clip=1e6)
    backend = InProcessSupervisedBackend(
        path, TrainerConfig(**{"device": "cpu", "optimizer": optimizer, **settings}), seed=0
    )
    backend.load(None)
    return backend


def plain(path: Path) -> Any:
    """The model as transformers loads it."""
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)


def plain_loss(model: Any, sequence: TrainSequence) -> torch.Tensor:
    """What transformers' own loss says of one sample, a mean over its learned tokens."""
    ids = torch.from_numpy(sequence.token_ids_X)[None]
    labels = torch.where(torch.from_numpy(sequence.loss_mask_X)[None], ids, -100)
    inputs = {"mm_token_type_ids": torch.from_numpy(sequence.image_mask_X).long()[None]}
    if sequence.images:
        inputs["pixel_values"] = torch.cat([image.pixel_values_PD for image in sequence.images])
        inputs["image_grid_thw"] = torch.tensor([image.grid_thw for image in sequence.images])
    loss: torch.Tensor = model(input_ids=ids, labels=labels, **inputs).loss
    return loss


@pytest.mark.parametrize("number", range(5))
def test_loss_and_gradient_of_a_row_are_those_of_transformers(
    tiny_model_path: Path, sequences: list[TrainSequence], number: int
) -> None:
    """Every weight's gradient within 1e-5, of text, a picture, two pictures, two answers."""
    backend, model = backend_of(tiny_model_path), plain(tiny_model_path)
    loss = plain_loss(model, sequences[number])
    loss.backward()
    want = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = gradients(backend, [sequences[number]])
    assert float(loss.detach()) == pytest.approx(found.pop("loss"), abs=1e-5)
    assert found.keys() == {name for name, gradient in want.items() if gradient is not None}
    for name, gradient in found.items():
        torch.testing.assert_close(
            gradient, want[name], rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert max(float(gradient.abs().max()) for gradient in found.values()) > 1e-2


def gradients(backend: InProcessSupervisedBackend, batch: list[TrainSequence]) -> dict[str, Any]:
    """The gradient that a first step applies, by name, and its loss: AdamW's first average is a tenth of it."""
    metrics = backend.step(batch)
    with TemporaryDirectory() as folder:
        backend.save(Path(folder))
        averages = averages_of(Path(folder))
    return {"loss": metrics["loss"], **{name: average["exp_avg"] * 10 for name, average in averages.items()}}


@pytest.mark.parametrize(
    "cut",
    [{"micro_batch_tokens": 1}, {"micro_batch_tokens": 90}, {"micro_batch_tokens": 128, "fixed_rows": True}],
    ids=str,
)
def test_image_and_text_samples_mix_in_rows_and_the_step_is_the_same_however_they_are_cut(
    tiny_model_path: Path, sequences: list[TrainSequence], cut: dict[str, Any]
) -> None:
    """One row of all five, or any other cut: the mean over all learned tokens."""
    whole = gradients(backend_of(tiny_model_path), sequences)
    pieces = gradients(backend_of(tiny_model_path, **cut), sequences)
    for name, gradient in whole.items():
        torch.testing.assert_close(torch.as_tensor(pieces[name]), torch.as_tensor(gradient), rtol=0, atol=1e-5)
    model = plain(tiny_model_path)
    tokens = [sequence.num_own_tokens for sequence in sequences]
    with torch.no_grad():
        losses = [float(plain_loss(model, sequence)) for sequence in sequences]
    assert whole["loss"] == pytest.approx(
        sum(loss * number for loss, number in zip(losses, tokens, strict=True)) / sum(tokens), abs=1e-5
    )


def test_measuring_gives_the_loss_of_a_step_and_changes_nothing(
    tiny_model_path: Path, sequences: list[TrainSequence]
) -> None:
    """Before it; and the parts of a set add up to the set."""
    backend = backend_of(tiny_model_path)
    measured = backend.measure(sequences)
    parts = backend.measure(sequences[:2]) + backend.measure(sequences[2:])
    assert measured == backend.measure(sequences)
    assert parts.mean == pytest.approx(measured.mean, abs=1e-6)
    assert isinstance(measured, TokenLoss)
    assert measured.num_tokens == sum(sequence.num_own_tokens for sequence in sequences)
    metrics = backend.step(sequences)
    assert metrics["loss"] == pytest.approx(measured.mean, abs=1e-6)
    assert metrics["num_tokens"] == measured.num_tokens
    assert backend.measure(sequences).mean < measured.mean


def test_frozen_parts_stay_as_they_are(tiny_model_path: Path, sequences: list[TrainSequence], tmp_path: Path) -> None:
    """The optimizer's settings are those of reinforcement learning."""
    from safetensors.torch import load_file

    optimizer = OptimizerConfig(learning_rate=1e-3, learning_rates={"tower": 0.0})
    backend = backend_of(tiny_model_path, optimizer=optimizer)
    backend.step(sequences)
    backend.save(tmp_path)
    before = load_file(tiny_model_path / "model.safetensors")
    after = load_file(tmp_path / "model" / "model.safetensors")
    changed = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    assert any("language_model" in name for name in changed)
    assert not any("visual" in name and "merger" not in name for name in changed)


@pytest.mark.parametrize("row_tokens", [1, 10_000], ids=["a row each", "one row"])
def test_with_the_text_frozen_samples_without_images_teach_nothing(
    tiny_model_path: Path, sequences: list[TrainSequence], row_tokens: int
) -> None:
    """The first stage of a vision-language model's training; they count in the mean all the same."""
    text = [sequence for sequence in sequences if not sequence.images]
    assert 0 < len(text) < len(sequences)
    optimizer = OptimizerConfig(learning_rate=1e-3, grad_clip=1e6, learning_rates={"text": 0.0})
    backend = backend_of(tiny_model_path, optimizer=optimizer, micro_batch_tokens=row_tokens)
    before = backend.measure(sequences)
    assert backend.step(text)["grad_norm"] == 0.0
    assert backend.measure(sequences) == before
    metrics = backend.step(sequences)
    assert metrics["grad_norm"] > 0
    assert metrics["num_tokens"] == before.num_tokens
