"""The tiny Qwen3-VL that has begun to zoom in: the checkpoint that ships for the multi-turn demo."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

from models.pretrain_zoom import MAX_PIXELS, START, make_start
from penstock import shipped
from services.trainer.data.geometry import GeometryDataset
from services.trainer.data.geometry_sheets import GeometrySheets

CHECKPOINT = shipped.models()["tiny-qwen3-vl-zoom"]
NUM_ROWS = 24


@pytest.fixture(scope="module")
def processor() -> Any:
    """The processor that ships with the checkpoint."""
    return transformers.AutoProcessor.from_pretrained(CHECKPOINT)


@pytest.fixture(scope="module")
def model() -> Any:
    """The checkpoint that ships, on one thread."""
    torch.set_num_threads(1)
    return transformers.Qwen3VLForConditionalGeneration.from_pretrained(CHECKPOINT, dtype=torch.float32)


def test_it_differs_from_its_start_in_the_size_of_pictures_alone(processor: Any, tmp_path: Path) -> None:
    """Tokenizer, template and every setting are as training began; the weights are those of training."""
    make_start(tmp_path / "start")
    files = {file.name for file in CHECKPOINT.iterdir()} - {"README.md", "model.safetensors", "config.json"}
    began = transformers.AutoProcessor.from_pretrained(tmp_path / "start")
    assert {"tokenizer.json", "chat_template.jinja", "preprocessor_config.json"} <= files
    assert processor.tokenizer.get_vocab() == began.tokenizer.get_vocab()
    assert processor.chat_template == began.chat_template
    assert processor.image_processor.to_dict() == began.image_processor.to_dict()
    plain = transformers.AutoProcessor.from_pretrained(shipped.models()[START])
    picture = Image.new("RGB", (480, 480))
    assert _num_pixels(processor, picture) <= MAX_PIXELS < _num_pixels(plain, picture)


def test_it_has_begun_to_zoom_in_and_has_much_to_learn(processor: Any, model: Any) -> None:
    """It knows the form of a call; whether it looks, where it looks and what it reads are right in part."""
    pictures = GeometryDataset(NUM_ROWS, seed=1, kinds=["x", "y", "length"], pictures="held_out")
    demonstrations = GeometrySheets(pictures, num_cells=5, demonstrations=True)
    means = torch.tensor([_probabilities(model, processor, row["messages"]) for row in demonstrations]).mean(0)
    looks, form, aims, reads = means.tolist()
    assert form > 0.9
    assert 0.5 < looks < 0.8
    assert 0.4 < aims < 0.8
    assert 0.7 < reads < 0.95


def _num_pixels(processor: Any, picture: Image.Image) -> int:
    _, height, width = processor.image_processor(images=[picture])["image_grid_thw"][0]
    return int(height * width) * processor.image_processor.patch_size**2


def _probabilities(model: Any, processor: Any, messages: list[dict[str, Any]]) -> list[float]:
    """Of calling the zoom at all; of the call's text besides the box; of the box; of the answer to what it shows."""
    pictures = [Image.open(io.BytesIO(part["image"]["bytes"])) for part in _parts(messages) if part["type"] == "image"]
    text = processor.apply_chat_template([_as_template_reads(each) for each in messages], tokenize=False)
    inputs = processor(text=[text], images=pictures, return_tensors="pt")
    ids = inputs["input_ids"][0]
    with torch.no_grad():
        logprobs = model(**inputs).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    tokens = [processor.tokenizer.decode([token]) for token in ids.tolist()]
    begin, end = tokens.index("<tool_call>"), tokens.index("</tool_call>")
    brackets = [place for place in range(begin, end) if "[" in tokens[place] or "]" in tokens[place]]
    box = slice(brackets[0], brackets[-1] - 1)
    replies = [place for place, token in enumerate(tokens) if token == "<|im_start|>"]
    answer = slice(next(place for place in range(replies[-1], len(tokens)) if "\n" in tokens[place]), len(tokens) - 2)
    form = logprobs[begin:end].sum() - logprobs[box].sum()
    return [each.exp().item() for each in (logprobs[begin - 1], form, logprobs[box].sum(), logprobs[answer].sum())]


def _parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [part for message in messages if isinstance(message.get("content"), list) for part in message["content"]]


def _as_template_reads(message: dict[str, Any]) -> dict[str, Any]:
    """The message in the form that the chat template takes."""
    calls = [{"type": "function", "function": call} for call in message.get("tool_calls", ())]
    return {"content": "", **message, **({"tool_calls": calls} if calls else {})}
