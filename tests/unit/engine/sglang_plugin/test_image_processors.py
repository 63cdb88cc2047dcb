"""Image processors of engines: the bounds of the model's own files, on CPUs few imports, and each prompt once."""

import ast
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from services.rollout.engine.sglang_plugin import image_processors

PACKAGE = "sglang.srt.multimodal.processors"


class Qwen3VLForConditionalGeneration:
    """An architecture of Qwen's."""


class Glm4vForConditionalGeneration:
    """Another one."""


@pytest.fixture
def mapping(monkeypatch: pytest.MonkeyPatch) -> dict[type, type]:
    """SGLang's table of processors, without SGLang, which takes ten seconds to import."""
    qwen = type("QwenVLImageProcessor", (), {"models": [Qwen3VLForConditionalGeneration]})
    modules: dict[str, dict[str, Any]] = {
        "sglang.srt.managers.multimodal_processor": {"PROCESSOR_MAPPING": {}},
        f"{PACKAGE}.qwen_vl": {"QwenVLImageProcessor": qwen},
    }
    for name, members in modules.items():
        module = ModuleType(name)
        module.__dict__.update(members)
        for parent in ("sglang", "sglang.srt", "sglang.srt.managers", "sglang.srt.multimodal", PACKAGE):
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(image_processors, "_postponed", [])
    found: dict[type, type] = modules["sglang.srt.managers.multimodal_processor"]["PROCESSOR_MAPPING"]
    return found


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [(Qwen3VLForConditionalGeneration, []), (Glm4vForConditionalGeneration, [(PACKAGE, {"overwrite": False})])],
)
def test_others_are_imported_when_a_model_needs_one(
    mapping: dict[type, type], architecture: type, expected: list[tuple[str, dict[str, bool]]]
) -> None:
    """Once, as SGLang asked for it."""
    imported = []

    def import_all(package: str, **options: bool) -> None:
        imported.append((package, options))
        mapping[Glm4vForConditionalGeneration] = object

    image_processors.import_some(import_all, PACKAGE, overwrite=False)
    assert list(mapping) == [Qwen3VLForConditionalGeneration]
    for _ in range(2):
        image_processors.import_others(SimpleNamespace(architectures=[architecture.__name__]))
    assert imported == expected


def test_somebodys_own_processors_are_imported_at_once(mapping: dict[type, type]) -> None:
    """Over SGLang's."""
    imported = []
    image_processors.import_some(lambda package, **options: imported.append((package, options)), "mine", overwrite=True)
    assert imported == [("mine", {"overwrite": True})]


def test_a_groups_prompt_is_expanded_once(mapping: dict[type, type]) -> None:
    """Another prompt, or another picture in it, is another one; prompts of text are SGLang's own to keep."""
    expanded = []

    class Processor:
        models = (Qwen3VLForConditionalGeneration,)

        def _build_image_prompt_template(self, prompt: str | list[int], grids: object) -> tuple[object, object]:
            assert isinstance(prompt, str | list)  # SGLang counts in lists
            expanded.append((prompt, grids))
            if not grids:
                raise ValueError("prompt placeholders without images")
            return prompt, grids

    sys.modules[f"{PACKAGE}.qwen_vl"].QwenVLImageProcessor = Processor  # type: ignore[attr-defined]
    image_processors.import_some(lambda *_, **__: None, PACKAGE)
    processor = mapping[Qwen3VLForConditionalGeneration]()
    small, large = ((1, 2, 2),), ((1, 4, 4),)
    for prompt, grids in [([1, 2], small), ([1, 2], small), ([1, 3], small), ([1, 2], large), ("x", small)]:
        assert processor._build_image_prompt_template(prompt, grids) == (prompt, grids)  # type: ignore[attr-defined]
    assert expanded == [([1, 2], small), ([1, 3], small), ([1, 2], large), ("x", small)]
    for _ in range(2):
        with pytest.raises(ValueError, match="placeholders"):  # SGLang falls back
            processor._build_image_prompt_template([1, 2], ())  # type: ignore[attr-defined]


def test_sglang_expands_prompts_by_the_method_that_is_overridden() -> None:
    """By another one each sample of a group would expand its prompt again, and nobody would notice."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    file = Path(spec.submodule_search_locations[0]) / "srt" / "multimodal" / "processors" / "qwen_vl.py"
    (processor,) = (
        node
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "QwenVLImageProcessor"
    )
    methods = {node.name: node for node in processor.body if isinstance(node, ast.FunctionDef)}
    arguments = methods["_build_image_prompt_template"].args.args
    assert [each.arg for each in arguments] == ["self", "input_text", "grid_key"]
    assert "self._build_image_prompt_template(" in ast.unparse(methods["compose_image_artifacts"])


@pytest.mark.parametrize(
    ("model_type", "file", "expected"),
    [
        ("qwen2_vl", {"size": {"shortest_edge": 9216, "longest_edge": 50176}}, (9216, 50176)),
        ("qwen2_vl", {"min_pixels": 3136, "max_pixels": 12845056}, (3136, 12845056)),
        ("qwen2_5_vl", {"size": {"shortest_edge": 9216, "longest_edge": 50176}}, None),
    ],
)
def test_pictures_are_as_large_as_the_models_files_say(
    tmp_path: Path, model_type: str, file: dict[str, Any], expected: tuple[int, int] | None
) -> None:
    """SGLang would shrink a picture for Qwen2-VL to a million pixels, where the trainer does not."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(file))
    sizes = [] if expected is None else [("size", dict(zip(("shortest_edge", "longest_edge"), expected, strict=True)))]
    given = {"tokenizer_mode": "auto"}
    assert image_processors.keep_bounds(str(tmp_path), **given) == ((str(tmp_path),), given | dict(sizes))
    given = {"size": {"shortest_edge": 1, "longest_edge": 2}}
    assert image_processors.keep_bounds(str(tmp_path), "more", **given) == ((str(tmp_path), "more"), given)
