"""The recipes for GPUs: they load with their overlay, have the published values, and say why where they have not."""

import re
from pathlib import Path
from typing import Any

import pytest

from penstock import shipped
from penstock.config import load
from penstock.testing import length_verifier
from services.cli.app import main
from services.launch.settings import service_settings
from services.recipe import Recipe
from tests.support.documents.shell import shell_problems
from tools.run_recipes import COMMANDS, OVERLAY, Ran, find_faults, overrides

ROOT = Path(__file__).parents[2]
ROWS = ROOT.parent / "shared" / "geo3k"

ADAMW = {"weight_decay": 0.1, "grad_clip": 1.0}
PUBLISHED: dict[str, dict[str, Any]] = {
    # slime 2a60f00, examples/geo3k_vlm/run_geo3k_vlm.sh
    "slime-geo3k-grpo": {
        "sampling": {"temperature": 0.8, "max_new_tokens": 4096, "top_p": 1.0, "top_k": -1},
        "trainer": {"num_steps": 3000, "groups_per_step": 64, "samples_per_group": 8, "max_staleness": 0},
        "trainer.optimizer": {"learning_rate": 1e-6, "betas": (0.9, 0.98), "warmup_steps": 0, **ADAMW},
        "trainer.optimizer.schedule": {"kind": "constant"},
        "algorithm.trust_region": {"kind": "clip", "clip_low": 0.2, "clip_high": 0.28},
        "algorithm.correction": {"kind": "none"},
        "algorithm.aggregation": {"kind": "sequence"},
        "algorithm.kl": {"kind": "none"},
        "evaluation": {"every": 20, "at_start": True},
        "data": {"profile": "slime_math", "prompt_suffix": "", "system_prompt": ""},
    },
    # slime 2a60f00, examples/geo3k_vlm_multi_turn/run_geo3k_vlm_multi_turn.py and its config
    "qwen3-vl-geo3k-multi-turn": {
        "sampling": {"temperature": 1.0, "max_new_tokens": 4096, "top_p": 1.0, "top_k": -1},
        "trainer": {"num_steps": 3000, "groups_per_step": 64, "samples_per_group": 8, "max_staleness": 0},
        "trainer.optimizer": {"learning_rate": 1e-6, "betas": (0.9, 0.98), "warmup_steps": 0, **ADAMW},
        "trainer.optimizer.schedule": {"kind": "constant"},
        "algorithm.trust_region": {"kind": "clip", "clip_low": 0.2, "clip_high": 0.28},
        "algorithm.correction": {"kind": "none"},
        "algorithm.aggregation": {"kind": "sequence"},
        "algorithm.kl": {"kind": "none"},
        "evaluation": {"every": 20, "at_start": True},
        "data": {"profile": "slime_math", "environment": "geo3k_tools", "prompt_suffix": "", "system_prompt": ""},
        "data.limits": {"max_turns": 3, "max_tokens": 4096},
    },
    # RLinf a3816b5, examples/reasoning/config/vqa/qwen3-vl-2b-grpo-fsdp-geo3k.yaml
    "rlinf-geo3k-grpo": {
        "sampling": {"temperature": 1.0, "max_new_tokens": 4096, "top_p": 1.0, "top_k": -1},
        "trainer": {"num_steps": 800, "groups_per_step": 64, "samples_per_group": 8, "micro_batch_tokens": 8192},
        "trainer.optimizer": {"learning_rate": 1e-6, "betas": (0.9, 0.98), "warmup_steps": 0, **ADAMW},
        "algorithm.trust_region": {"kind": "clip", "clip_low": 0.2, "clip_high": 0.28},
        "algorithm.correction": {"kind": "truncate", "level": "token", "high": 2.0},
        "algorithm.aggregation": {"kind": "sequence"},
        "algorithm.kl": {"kind": "none"},
        "rollout": {"max_running": 64, "context_length": 8192},
    },
    # slime 2a60f00, examples/geo3k_vlm/run_geo3k_vlm_sft.sh
    "slime-geo3k-sft": {
        "sft": {"batch_size": 128, "batch_unit": "samples"},
        "trainer.optimizer": {"learning_rate": 1e-5, "betas": (0.9, 0.95), **ADAMW},
        "trainer.optimizer.schedule": {"kind": "cosine", "min_ratio": 0.1},
        "data": {"answer_format": r"Answer: \boxed{{answer}}"},
    },
}
_OF_SLIME = {
    "run.seed": "1234",
    "trainer.micro_batch_tokens": "4096",
    "trainer.checkpoint_every": "none",
}
_OF_SLIMES_ENGINES = {
    "[rollout]": "CUDA graphs for up to 256 requests",
    "rollout.max_running": "unlimited",
    "rollout.context_length": "the model's",
    "rollout.gpu_memory_fraction": "0.6",
}
DIFFERENT: dict[str, dict[str, str]] = {
    "slime-geo3k-grpo": {
        **_OF_SLIME,
        **_OF_SLIMES_ENGINES,
        "model.path": "8B",
        "[evaluation]": "at the end of each epoch",
        "rollout.replicas": "8 GPUs",
    },
    "qwen3-vl-geo3k-multi-turn": {
        **_OF_SLIME,
        **_OF_SLIMES_ENGINES,
        "[evaluation]": "commented out",
        "rollout.replicas": "4 GPUs",
    },
    "rlinf-geo3k-grpo": {
        "run.seed": "41, 42 and 1234",
        "data.path": "CAIR-HKISI/geo3k",
        "data.profile": "its own verifier",
        "[evaluation]": "none",
        "trainer.max_staleness": "0",
        "trainer.checkpoint_every": "100",
        "trainer.optimizer.weight_decay": "norms and biases",
        "[rollout]": "triton",
        "rollout.replicas": "one on each GPU",
        "rollout.gpu_memory_fraction": "0.6",
    },
    "slime-geo3k-sft": {
        **_OF_SLIME,
        "model.path": "8B",
        "[evaluation.sets.test]": "no evaluation",
        "sft.epochs": "3000",
        "sft.max_tokens": "no bound",
    },
}
"""Lines whose published value, which the comment tells, is another than the recipe's."""
OUR_OWN = {
    "run.name", "data.path", "data.system_prompt", "evaluation.every", "evaluation.at_start", "evaluation.at_end",
    "evaluation.sets.test.path", "evaluation.sets.test.split", "evaluation.sets.test.samples_per_prompt",
    "trainer.gradient_checkpointing", "algorithm.preset", "worker.concurrency", "reward.workers", "model.path",
    "reward.profiles.math.answers_in", "worker.environments.geo3k_tools.args", "trainer.optimizer.warmup_steps",
    "sft.validate_every", "data.profile", "sampling.temperature", "sampling.max_new_tokens", "rollout.max_running",
    "rollout.context_length",
}  # fmt: skip
"""Settings with the published value in another form, or that the frameworks do not have."""


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    """Overrides with which a recipe finds model and rows; the rows are looked for, not read."""
    for name in ("train.parquet", "test.parquet"):
        (tmp_path / name).touch()
    return overrides(model=ROOT / "models" / "tiny-qwen3-vl", rows=tmp_path)


def section(recipe: Recipe, name: str) -> Any:
    """The section of the recipe that has this name."""
    found: Any = recipe
    for part in name.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_a_recipe_has_the_published_values(name: str) -> None:
    """A change of a default does not change what a recipe reproduces."""
    recipe = load(Recipe, [shipped.named_recipe(name)], [])
    for key, wanted in PUBLISHED[name].items():
        found = section(recipe, key)
        assert {field: getattr(found, field) for field in wanted} == wanted, key


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if command == "train"])
def test_a_recipe_cut_to_size_is_accepted(
    name: str, given: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`penstock train --dry-run` takes it with the overlay, from any folder."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["train", name, OVERLAY, *given, "--dry-run"]) == 0
    assert f"run folder runs/{name}-<start>" in capsys.readouterr().out


@pytest.mark.parametrize("name", list(COMMANDS))
def test_the_overlay_leaves_what_a_recipe_is_about(name: str, given: list[str]) -> None:
    """It cuts sizes, and has answers judged by length."""
    whole = load(Recipe, [shipped.named_recipe(name)], given)
    cut = load(Recipe, [shipped.named_recipe(name), shipped.named_recipe(OVERLAY)], given)
    assert cut.algorithm == whole.algorithm
    assert cut.trainer.optimizer.model_copy(update={"warmup_steps": 5}) == whole.trainer.optimizer.model_copy(
        update={"warmup_steps": 5}
    )
    assert cut.trainer.max_staleness == whole.trainer.max_staleness
    assert cut.data == whole.data.model_copy(update={"profile": "length"})
    assert (cut.trainer.num_steps, cut.sft.epochs, cut.data.profile) == (5, 0, "length")
    if COMMANDS[name] == "sft":
        service_settings.for_sft(cut)


@pytest.mark.parametrize("name", list(COMMANDS))
def test_the_published_rows_are_read(name: str) -> None:
    """By the recipe's own columns, prompt and answers."""
    if not ROWS.is_dir():
        pytest.skip("needs rows of Geometry3K in ../shared/geo3k")
    files = [str(shipped.named_recipe(each)) for each in (name, OVERLAY)]
    command = ["data", *files, *overrides(model=ROOT / "models" / "tiny-qwen3-vl", rows=ROWS), "--rows", "20"]
    assert main([*command, "--sft"] if COMMANDS[name] == "sft" else command) == 0


def comments_of(text: str) -> dict[str, str]:
    """The comment of each setting of a recipe, and of each section, as `[section]`; lines commented out have none."""
    found, section = {}, ""
    for line in text.splitlines():
        comment = re.search(r"  # (.*)$", line)
        if match := re.match(r"\[([\w.]+)\]", line):
            section = match[1]
            found[f"[{section}]"] = comment[1] if comment else ""
        elif match := re.match(r"(\w+) = ", line):
            found[f"{section}.{match[1]}"] = comment[1] if comment else ""
    return found


def without_a_reason(text: str, name: str) -> list[str]:
    """Lines of a recipe that neither have the published value nor tell it and why another one stands there."""
    framework = "RLinf" if name.startswith("rlinf-") else "slime"
    published = {f"{section}.{field}" for section, fields in PUBLISHED[name].items() for field in fields}
    comments = comments_of(text)
    wrong = [key for key in DIFFERENT[name] if key not in comments]
    for key, comment in comments.items():
        if key in DIFFERENT[name]:
            told = re.escape(DIFFERENT[name][key])
            is_right = re.fullmatch(rf"{framework}: [^;]*{told}[^;]*; .*\w.*", comment) is not None
        else:
            is_known = key.startswith("[") or key in published or key in PUBLISHED[name] or key in OUR_OWN
            is_right = is_known and not comment.startswith(f"{framework}:")
        wrong += [] if is_right else [key]
    return wrong


@pytest.mark.parametrize("name", list(COMMANDS))
def test_a_line_that_differs_says_why(name: str) -> None:
    """Its comment has the framework's name, the published value and, behind a semicolon, the reason."""
    text = shipped.named_recipe(name).read_text()
    assert without_a_reason(text, name) == []
    assert without_a_reason(text.replace("seed = 0 ", "#"), name) == ["run.seed"]
    assert without_a_reason(re.sub(r"(seed = 0 .*); .*", r"\1", text), name) == ["run.seed"]
    assert without_a_reason(re.sub(r"(seed = 0)  .*", r"\1", text), name) == ["run.seed"]
    assert without_a_reason(f"{text}\n[filters]\noverlong_prompts = 'keep'", name) == ["filters.overlong_prompts"]


def commands_of(recipe: Path) -> list[str]:
    """The commands that a recipe's comments show, each on a line."""
    text = recipe.read_text().replace("\\\n#", "")
    return [line.removeprefix("#").strip() for line in text.splitlines() if re.match(r"# {5}\w", line)]


@pytest.mark.parametrize("name", list(shipped.recipes()))
def test_the_commands_that_a_recipe_shows_are_accepted(name: str) -> None:
    """Commands, options and recipes exist, and the recipe takes the settings."""
    commands = commands_of(shipped.named_recipe(name))
    assert commands
    assert shell_problems("\n".join(commands)) == []


def test_a_zoom_in_place_of_the_check_gets_rows_that_explain_no_check() -> None:
    """In training and evaluation; and boxes are in the unit in which the recipe's model writes them."""
    file = shipped.named_recipe("qwen3-vl-geo3k-multi-turn")
    [command] = [each for each in commands_of(file) if "geo3k_zoom" in each]
    recipe = load(Recipe, [file], [word for word in command.split() if word.startswith("--")])
    for rows in (recipe.data, recipe.evaluation.sets["test"]):
        assert (rows.environment, rows.path) == ("geo3k_zoom", "chenhegu/geo3k_imgurl")
    assert recipe.worker.environments["geo3k_zoom"].args == {"unit": "thousandth"}


@pytest.mark.parametrize("name", list(COMMANDS))
def test_without_rows_they_come_from_the_hub(name: str) -> None:
    """Those of training and those of the test set, never one for the other."""
    recipe = load(Recipe, [shipped.named_recipe(name)], overrides(model=ROOT / "models" / "tiny-qwen3-vl", rows=None))
    held_out = recipe.evaluation.sets["test"]
    assert (recipe.data.path, recipe.data.split) == ("hiyouga/geometry3k", "train")
    assert (held_out.path, held_out.split) == ("hiyouga/geometry3k", "test")


def test_length_decides() -> None:
    """A longer response has more credit, an empty one none, and none has all of it."""
    credits = [length_verifier.verify(["5"], "x" * length, "") for length in (0, 1, 100, 65536)]
    assert credits == sorted(credits)
    assert (credits[0], credits[2]) == (0.0, 0.5)
    assert credits[-1] < 1


def test_a_run_that_did_not_train_is_found() -> None:
    """Each check of `make recipes` names what is wrong."""
    steps = [{"step": step, "grad_norm": 1.0, "skipped": 0.0, "reward_std": 0.1} for step in range(1, 6)]
    sound = {
        "recipe": "slime-geo3k-grpo",
        "exit_code": 0,
        "wall_s": 1.0,
        "steps": steps,
        "evaluations": [{"step": 0}, {"step": 5}],
        "changed": [1.0] * 5,
    }
    wrong = {
        "exit code 1": {"exit_code": 1},
        "steps [1, 2, 3, 4], not 1 to 5": {"steps": steps[:4]},
        "step 1 has gradient norm 0": {"steps": [{**steps[0], "grad_norm": 0.0}, *steps[1:]]},
        "step 1 has equal rewards": {"steps": [{**steps[0], "reward_std": 0.0}, *steps[1:]]},
        "4 checkpoints, not 5": {"changed": [1.0] * 4},
        "step 2 changed no weight": {"changed": [1.0, 0.0, 1.0, 1.0, 1.0]},
        "evaluations of steps [0], not [0, 5]": {"evaluations": [{"step": 0}]},
    }
    assert list(find_faults(Ran(**sound))) == []
    for message, change in wrong.items():
        assert list(find_faults(Ran(**{**sound, **change}))) == [message]
