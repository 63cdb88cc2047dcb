"""Geometry3K in each form in which it is published: one row, read without any setting."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import DataError
from penstock.model.images import decode_image
from penstock.records import ImagePart, TextPart
from services.trainer.data.config import DataConfig
from services.trainer.data.dataset import open_dataset
from services.trainer.data.sources.opening import open_sources
from tests.support.trainer.data.pictures import jpeg, png

PNG, JPEG = png("blue"), jpeg("blue")
QUESTION = "Find x."
CELL = {"bytes": PNG, "path": "images/0.png"}
TOOL_PROTOCOL = 'Call <tool_call>{"name": "calc_score", "arguments": {"answer": "..."}}</tool_call>, then box it.\n'


def data_uri(picture: bytes, kind: str) -> str:
    """A picture inside a text."""
    return f"data:image/{kind};base64,{base64.b64encode(picture).decode()}"


HIYOUGA = {"images": [CELL], "problem": f"<image>{QUESTION}", "answer": "90"}
HIYOUGA_NEW = {**HIYOUGA, "id": "2401", "choices": ["60", "90"], "ground_truth": "B"}
CHENHEGU = {"problem": f"<image>{QUESTION}", "answer": "90", "images": [data_uri(PNG, "None")]}
VERA = {"problem": f"{TOOL_PROTOCOL}<image>{QUESTION}", "answer": "90", "images": [data_uri(PNG, "None")]}
CAIR = {"problem": f"<image>\n{QUESTION}", "images": [PNG], "answer": r"\boxed{90}"}
VERL = {
    "data_source": "hiyouga/geometry3k",
    "prompt": [{"content": f"<image>{QUESTION}", "role": "user"}],
    "images": [CELL],
    "ability": "math",
    "reward_model": {"ground_truth": "90", "style": "rule"},
    "extra_info": {"answer": "90", "index": 0, "question": f"<image>{QUESTION}", "split": "train"},
}
SKYRL = {
    "prompt": [
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": data_uri(JPEG, "jpeg")}, "text": None},
                {"type": "text", "image_url": None, "text": f"{TOOL_PROTOCOL}<image>{QUESTION}"},
            ],
        }
    ],
    "env_class": "geometry3k",
    "reward_spec": {"method": "rule", "ground_truth": "90"},
    "extra_info": {"split": "train", "index": 0, "problem": f"<image>{QUESTION}", "answer": "90"},
}
SLIME = {"problem": f"<image>{QUESTION}", "answer": "90", "images": [data_uri(PNG, "png")], "metadata": {"level": 3}}
SLIME_KEYS = {
    "input": f"<image>{QUESTION}",
    "label": "90",
    "images": [{"image": data_uri(PNG, "png"), "max_pixels": 9999}],
}
SINGULAR = {"image": CELL, "problem": f"<image>{QUESTION}", "answer": "90"}

SHAREGPT = {"conversations": [{"from": "human", "value": f"<image>{QUESTION}"}], "images": [CELL], "answer": "90"}

GEOQA = {"image": CELL, "problem": QUESTION, "solution": "<answer> 90 </answer>"}
OPEN_R1 = {
    "image": CELL,
    "problem": QUESTION,
    "solution": "<think>\nIt is a right angle.\n</think>\n\n<answer>90</answer>",
    "original_question": QUESTION,
    "original_answer": "90",
}
MATHVISTA = {
    "pid": "1",
    "question": QUESTION,
    "image": "images/1.jpg",
    "decoded_image": CELL,
    "choices": None,
    "answer": "90",
}

IMAGE, TEXT = ImagePart(index=0), TextPart(text=QUESTION)


def parquet(row: dict[str, Any], folder: Path) -> Path:
    """A file with one row."""
    pq.write_table(pa.Table.from_pylist([row]), folder / "train.parquet")
    return folder / "train.parquet"


def jsonl(row: dict[str, Any], folder: Path) -> Path:
    """The same as a line of JSON."""
    (folder / "train.jsonl").write_text(json.dumps(row))
    return folder / "train.jsonl"


@pytest.mark.parametrize(
    ("write", "row", "parts", "picture"),
    [
        pytest.param(parquet, HIYOUGA, (IMAGE, TEXT), PNG, id="hiyouga"),
        pytest.param(parquet, HIYOUGA_NEW, (IMAGE, TEXT), PNG, id="hiyouga-with-choices"),
        pytest.param(parquet, CHENHEGU, (IMAGE, TEXT), PNG, id="chenhegu"),
        pytest.param(parquet, VERA, (TextPart(text=TOOL_PROTOCOL), IMAGE, TEXT), PNG, id="VeraIsHere"),
        pytest.param(parquet, CAIR, (IMAGE, TextPart(text=f"\n{QUESTION}")), PNG, id="CAIR-HKISI"),
        pytest.param(parquet, VERL, (IMAGE, TEXT), PNG, id="verl"),
        pytest.param(parquet, SKYRL, (IMAGE, TextPart(text=TOOL_PROTOCOL + QUESTION)), JPEG, id="SkyRL"),
        pytest.param(jsonl, SLIME, (IMAGE, TEXT), PNG, id="slime"),
        pytest.param(jsonl, SLIME_KEYS, (IMAGE, TEXT), PNG, id="slime-with-its-default-keys"),
        pytest.param(parquet, SHAREGPT, (IMAGE, TEXT), PNG, id="ShareGPT"),
        pytest.param(parquet, SINGULAR, (IMAGE, TEXT), PNG, id="one-image-column"),
    ],
)
def test_a_published_form_needs_no_setting(
    write: Callable[[dict[str, Any], Path], Path],
    row: dict[str, Any],
    parts: tuple[Any, ...],
    picture: bytes,
    tmp_path: Path,
) -> None:
    """The picture is seen where the text has it, and the answer is the bare one."""
    example = open_dataset(DataConfig(path=str(write(row, tmp_path))))[0]
    (message,) = example.messages
    assert (message.role, message.parts) == ("user", parts)
    assert example.images == (picture,)
    assert example.golds == ("90",)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(GEOQA, id="GEOQA_R1V, clevr"),
        pytest.param(OPEN_R1, id="multimodal-open-r1"),
        pytest.param(MATHVISTA, id="MathVista, MathVision"),
    ],
)
def test_a_published_form_without_marks_needs_only_images_first(row: dict[str, Any], tmp_path: Path) -> None:
    """Answers that a solution marks, and pictures beside the names of their files."""
    path = str(parquet(row, tmp_path))
    with pytest.raises(DataError, match=r"0 <image>, but there are 1 images; .*--data\.images_first=true"):
        open_dataset(DataConfig(path=path))
    example = open_dataset(DataConfig(path=path, images_first=True))[0]
    (message,) = example.messages
    assert message.parts == (IMAGE, TEXT)
    assert example.images == (PNG,)
    assert example.golds == ("90",)


@pytest.mark.parametrize("split", ["train", "test"])
def test_rows_of_geometry3k(split: str) -> None:
    """Every twentieth real row: one picture each, and an answer without signs around it."""
    file = Path(__file__).parents[4] / "shared" / "geo3k" / f"{split}.parquet"
    if not file.is_file():
        pytest.skip(f"{file} is not there: rows of hiyouga/geometry3k beside the repository")
    source = open_sources(DataConfig(path=str(file)))[""]
    for number in range(0, len(source), 20):
        example = source[number]
        assert [len(decode_image(image).size) for image in example.images] == [2]
        assert len(example.golds) == 1
        assert not set("$") & set(example.golds[0])
