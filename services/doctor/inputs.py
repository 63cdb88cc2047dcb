"""Checks the recipe's model, data and settings as far as possible without loading anything."""

from collections.abc import Callable, Mapping
from pathlib import Path

from penstock.errors import ConfigError, UnavailableError, UserError
from penstock.model import hub
from penstock.model.families.experts import has_experts
from penstock.model.families.qwen_vl import TRAINED_MODEL_TYPES
from penstock.model.folder import read_json, require_model
from penstock.model.parameters import own_parameter_sizes
from penstock.runtime.security import Security
from services.doctor.finding import Finding, blamed, fault, ok, warning
from services.doctor.memory import ModelSize
from services.launch.checks.known_names import require_names
from services.launch.checks.model_fit import require_fits_model
from services.recipe import Recipe
from services.rollout.engine.sglang import recipe_settings
from services.trainer.checks.parameter_patterns import linear_layers, matches, rates_of
from services.trainer.data.sources.files import require_files
from services.trainer.demonstrations.files import require_demonstrations
from services.trainer.evaluation.set_files import require_sets
from services.trainer.sft.config import SftConfig, require_meant
from services.trainer.telemetry.trackers import require_packages

HUB_TIMEOUT_S = 5.0
_TEXT_FILES = ("tokenizer.json", "tokenizer_config.json")


def check_model(recipe: Recipe, *, is_sft: bool = False) -> tuple[Finding, ModelSize | None]:
    """Check the model's folder and the settings that depend on it, or ask the Hub for the model.

    Also return the model's size.
    """
    if recipe.model is None:
        return fault("model", "section [model] is missing", "give --model.path=, or add it to the recipe"), None
    path = hub.find_cached(recipe.model.path)
    if path is None:
        return _check_on_the_hub(recipe.model.path, recipe)
    try:
        require_model(path)
        model_type = read_json(path / "config.json").get("model_type", "")
        sizes = own_parameter_sizes(path)
    except UserError as error:
        return blamed("model", error), None
    count = sum(sizes.values())
    if not count:
        return fault("model", f"{path} has no .safetensors file", "download the model again, with its weights"), None
    size = ModelSize(
        num_parameters=count,
        num_trained=_num_trained(sizes, recipe),
        num_adapted=_num_adapted(sizes, recipe),
        checkpoint_bytes=sum(file.stat().st_size for file in path.glob("*.safetensors")),
    )
    if missing := [name for name in _TEXT_FILES if not (path / name).is_file()]:
        return fault("model", f"{path} has no {missing[0]}", "download the model again, with its tokenizer"), size
    seen = f"{path}: {model_type}, {count / 1e6:,.1f} million parameters"
    if model_type not in TRAINED_MODEL_TYPES:
        return fault("model", seen, f"the trainer takes {', '.join(TRAINED_MODEL_TYPES)}; choose one of these"), size
    try:
        require_fits_model(recipe, path, is_sft=is_sft)
    except UserError as error:
        return blamed("model", error), size
    return ok("model", seen), size


def _num_trained(sizes: Mapping[str, int], recipe: Recipe) -> int:
    """Count the parameters with a learning rate; all of them if patterns do not fit, which is a fault of its own."""
    if recipe.trainer.lora.rank:
        return 0
    try:
        rates = rates_of(list(sizes), recipe.trainer.optimizer.learning_rates, default=1.0)
    except ConfigError:
        return sum(sizes.values())
    return sum(size for name, size in sizes.items() if rates[name] > 0)


def _num_adapted(sizes: Mapping[str, int], recipe: Recipe) -> int:
    """Count the parameters of the matrices that adapters change."""
    lora = recipe.trainer.lora
    if not lora.rank:
        return 0
    return sum(
        sizes[f"{layer}.weight"]
        for layer in linear_layers(sizes)
        if any(matches(layer, target) for target in lora.targets)
    )


def _check_on_the_hub(path: Path, recipe: Recipe) -> tuple[Finding, ModelSize | None]:
    """Ask the Hub for a model that its cache lacks; nothing is downloaded."""
    model = hub.parse_id(path)
    assert model is not None, "a path is a model on the Hub, or on this machine"
    try:
        facts = hub.look_up(model, timeout_s=HUB_TIMEOUT_S)
    except (UserError, UnavailableError) as error:
        return blamed("model", error), None
    seen = f"{model} on the Hugging Face Hub: {facts.checkpoint_bytes / 1e9:,.1f} GB of weights to download"
    if not facts.num_parameters:
        return ok("model", f"{seen}; the Hub does not say how many parameters"), None
    lora = recipe.trainer.lora
    adapts_most = lora.rank > 0 and not {"text", "*"}.isdisjoint(lora.targets)
    size = ModelSize(
        num_parameters=facts.num_parameters,
        # The Hub tells no names. Of a mixture most parameters are experts, which take no adapters.
        num_trained=0 if lora.rank else facts.num_parameters,
        num_adapted=facts.num_parameters if adapts_most and not has_experts(facts.model_type) else 0,
        checkpoint_bytes=facts.checkpoint_bytes,
    )
    return ok("model", f"{seen}, {facts.num_parameters / 1e6:,.1f} million parameters"), size


def check_data(recipe: Recipe, *, is_sft: bool = False) -> Finding:
    """Check that the files of data, demonstrations and evaluation sets exist; the Hub has its own check."""
    try:
        for source in recipe.data.by_name.values():
            require_files(source)
    except UserError as error:
        return blamed("data", error)
    if recipe.demonstrations is not None and not is_sft:
        try:
            require_demonstrations(recipe.demonstrations)
        except UserError as error:
            return blamed("data", error)
    try:
        require_sets(recipe.evaluation)
    except UserError as error:
        found = blamed("data", error)
        is_needed = recipe.sft.validate_every > 0 if is_sft else recipe.evaluation.is_in_training
        return found if is_needed else warning("data", f"only for `penstock eval`: {found.seen}", found.remedy)
    paths = [path for source in recipe.data.by_name.values() for path in source.paths or ("the built-in pictures",)]
    return ok("data", f"{', '.join(paths)}; `penstock data` looks into the rows")


def check_settings(recipe: Recipe, *, is_sft: bool = False) -> Finding:
    """Check what depends on the machine or the command: packages of trackers, SGLang's names, certificates, sampling,
    names of profiles and environments; for `penstock sft`, that every setting applies to it."""
    checks: tuple[Callable[[], object], ...] = (
        lambda: Security.load(recipe.security),
        recipe.sampling.require_trainable,
        lambda: require_packages(recipe.trackers),
        lambda: recipe_settings.require_known(recipe.rollout.sglang),
        lambda: require_names(recipe, sets=recipe.evaluation.is_in_training),
    )
    if is_sft:
        checks = (
            lambda: require_packages(recipe.trackers),
            lambda: require_meant(
                sft=recipe.sft,
                trainer=recipe.trainer,
                data=recipe.data,
                evaluation=recipe.evaluation,
                metrics=recipe.metrics,
            ),
        )
    for check in checks:
        try:
            check()
        except UserError as error:
            return blamed("settings", error)
    if recipe.sft != SftConfig() and not is_sft:
        return ok("settings", "they fit `penstock train`; give --sft if `penstock sft` is to run")
    return ok("settings", "they fit each other")
