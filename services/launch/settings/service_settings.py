"""Takes each service's settings from a recipe: its own section and the shared ones that it uses, never the whole.

Only the settings that a service uses are checked here, so that NATS, the reward service and the router start on
machines without the model and the data.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.config import ModelConfig, RunConfig
from penstock.errors import ConfigError, InvalidRequestError
from penstock.model.chat.template_variables import require_free
from penstock.model.families.experts import num_experts
from penstock.model.folder import require_model
from penstock.model.tokens import require_same_tokens
from penstock.runtime.imports import import_with_extra
from services.launch.checks.known_names import require_names
from services.launch.checks.model_fit import require_fits_model
from services.launch.run_folder import RunFolder, dump_repeatable
from services.launch.settings.hub_models import with_model, with_models
from services.recipe import Recipe
from services.reward.config import RewardSettings
from services.rollout.engine.config import EngineSettings
from services.rollout.engine.expert_parallel import require_whole_experts
from services.rollout.engine.sglang import recipe_settings
from services.rollout.worker.config import WorkerSettings
from services.rollout.worker.environments.config import EnvironmentServerSettings
from services.router.config import RouterSettings
from services.trainer.checks.router_replay import require_mixture
from services.trainer.checks.schedule import schedule_contradiction
from services.trainer.config import TrainerSettings
from services.trainer.data.config import DataConfig
from services.trainer.data.named_section import named_section
from services.trainer.data.sources.files import pin, require_files
from services.trainer.demonstrations.files import require_demonstrations
from services.trainer.evaluation.set_files import pin_sets, require_sets
from services.trainer.sft.config import SftSettings, require_meant
from services.trainer.telemetry.trackers import require_packages


def for_reward(recipe: Recipe) -> RewardSettings:
    """Return the settings of `penstock serve reward`."""
    return RewardSettings(reward=recipe.reward, run=recipe.run, network=recipe.network, metrics=recipe.metrics)


def for_router(recipe: Recipe) -> RouterSettings:
    """Return the settings of `penstock serve router`.

    Raises:
        ConfigError: the OpenAI-compatible API is on, but model.path is no model.
        UnavailableError: the model is on the Hub, which cannot be reached.
    """
    if recipe.router.http_port is not None and recipe.model is not None:
        recipe = with_model(recipe, with_weights=False)
        _model(recipe)
    return RouterSettings(
        router=recipe.router,
        run=recipe.run,
        network=recipe.network,
        bus=recipe.bus,
        model=recipe.model,
        sampling=recipe.sampling,
        metrics=recipe.metrics,
    )


def for_engine(recipe: Recipe) -> EngineSettings:
    """Return the settings of `penstock serve rollout`.

    Raises:
        ConfigError: there is no model, trainer.router_replay is on with a dense model, its experts cannot be divided as
            rollout.expert_parallel says, or SGLang lacks a setting named in rollout.sglang.
        UnavailableError: the model is on the Hub, which cannot be reached.
    """
    recipe_settings.require_known(recipe.rollout.sglang)
    recipe = with_model(recipe)
    count = num_experts(_model(recipe).path)
    require_mixture(recipe.trainer.router_replay, num_experts=count)
    require_whole_experts(recipe.rollout.expert_parallel, num_experts=count)
    return EngineSettings(
        rollout=recipe.rollout,
        run=recipe.run,
        network=recipe.network,
        bus=recipe.bus,
        model=_model(recipe),
        float32_head=recipe.trainer.float32_head,
        router_replay=recipe.trainer.router_replay,
        group_timeout_s=recipe.trainer.weight_sync.stage_timeout_s,
        metrics=recipe.metrics,
    )


def for_worker(recipe: Recipe) -> WorkerSettings:
    """Return the settings of `penstock serve worker`.

    Raises:
        ConfigError: there is no model, or an address is missing.
        UnavailableError: the model is on the Hub, which cannot be reached.
    """
    worker = recipe.worker
    recipe = with_model(recipe, with_weights=False)
    return WorkerSettings(
        worker=worker,
        run=recipe.run,
        network=recipe.network,
        bus=recipe.bus,
        model=_model(recipe),
        sampling=recipe.sampling,
        context_length=recipe.rollout.context_length,
        router_replay=recipe.trainer.router_replay,
        router_address=_address(recipe, worker.router_address, recipe.router.port, "router"),
        reward_address=_address(recipe, worker.reward_address, recipe.reward.port, "reward"),
        router_url=_router_url(recipe) if worker.agents else "",
        metrics=recipe.metrics,
    )


def for_environments(recipe: Recipe) -> EnvironmentServerSettings:
    """Return the settings of `penstock serve environments`.

    Raises:
        ConfigError: there is no environment to serve, or one is at a server already.
    """
    tables, server = recipe.worker.environments, recipe.environment_server
    elsewhere = [name for name, table in tables.items() if table.url]
    names = server.names or tuple(name for name in tables if name not in elsewhere)
    if wrong := sorted({*names} & {*elsewhere}):
        raise ConfigError(
            f"environment_server.names has {', '.join(wrong)}, which worker.environments finds at another server; "
            "leave it out, or give its class in place of its url"
        )
    if not names:
        raise ConfigError(
            "there is no environment to serve; give --worker.environments.NAME=package.module:Class, or "
            "--environment_server.names for those that are built in or installed"
        )
    return EnvironmentServerSettings(
        server=server.model_copy(update={"names": names}),
        environments=tables,
        max_processes=recipe.worker.environment_processes,
        run=recipe.run,
        network=recipe.network,
        metrics=recipe.metrics,
    )


def for_trainer(recipe: Recipe) -> TrainerSettings:
    """Return the settings of `penstock serve trainer`.

    Raises:
        ConfigError: there is no model or no data, the sampling cannot be trained on, trainer.router_replay is on with a
            dense model, the reference is no model with the same tokens, the chat template does not read a variable, or
            a tracker is not installed.
        UnavailableError: a model is on the Hub, which cannot be reached.
    """
    require_trainable_without_model(recipe)
    recipe = with_models(recipe)
    require_template_variables(
        recipe, _model(recipe).path, with_sets=recipe.evaluation.is_in_training, with_demonstrations=True
    )
    require_mixture(recipe.trainer.router_replay, num_experts=num_experts(_model(recipe).path))
    _require_reference(recipe)
    return TrainerSettings(
        trainer=recipe.trainer,
        algorithm=recipe.algorithm,
        filters=recipe.filters,
        run=recipe.run,
        network=recipe.network,
        bus=recipe.bus,
        model=_model(recipe),
        data=recipe.data,
        sampling=recipe.sampling,
        trackers=recipe.trackers,
        episodes=recipe.episodes,
        trace=recipe.trace,
        evaluation=recipe.evaluation,
        demonstrations=recipe.demonstrations,
        context_length=recipe.rollout.context_length,
        metrics=recipe.metrics,
        recipe_text="" if _has_launcher(recipe.run) else dump_repeatable(recipe),
    )


def _has_launcher(run: RunConfig) -> bool:
    """Return whether a launcher keeps the run's recipe, without the addresses of this launch; it gives the folder."""
    return run.folder is not None and RunFolder(run.folder).live_file.exists()


def for_sft(recipe: Recipe) -> SftSettings:
    """Return the settings of `penstock sft`.

    Raises:
        ConfigError: there is no model or no data, a setting does not apply or does not fit the model, the chat
            template does not read a variable, or a tracker is not installed.
        UnavailableError: the model is on the Hub, which cannot be reached.
    """
    with_sets = recipe.sft.validate_every > 0
    _require_files(recipe, with_sets=with_sets)
    require_packages(recipe.trackers)
    recipe = with_model(recipe)
    require_template_variables(recipe, _model(recipe).path, with_sets=with_sets)
    settings = SftSettings(
        sft=recipe.sft,
        trainer=recipe.trainer,
        run=recipe.run,
        model=_model(recipe),
        data=recipe.data,
        trackers=recipe.trackers,
        evaluation=recipe.evaluation,
    )
    require_meant(
        sft=recipe.sft,
        trainer=recipe.trainer,
        data=recipe.data,
        evaluation=recipe.evaluation,
        metrics=recipe.metrics,
    )
    require_fits_model(recipe, settings.model.path, is_sft=True)
    return settings


def require_trainable_without_model(recipe: Recipe) -> None:
    """Check what of the trainer's inputs can be checked before its model is there.

    Raises:
        ConfigError: there is no data, the sampling cannot be trained on, the learning rate's schedule does not fit
            into the steps, or a tracker is not installed.
    """
    _require_schedule(recipe)
    _require_files(recipe, with_sets=recipe.evaluation.is_in_training, with_demonstrations=True)
    require_packages(recipe.trackers)
    recipe.sampling.require_trainable()


def _require_schedule(recipe: Recipe) -> None:
    """Check it also where the recipe has epochs of a supervised run, whose rows would decide on the steps."""
    trainer = recipe.trainer
    if reason := schedule_contradiction(trainer.optimizer, num_steps=trainer.num_steps):
        raise ConfigError(f"trainer.num_steps = {trainer.num_steps}: {reason}")


def require_inputs_without_model(recipe: Recipe) -> None:
    """Check what of a whole run's inputs can be checked before its model is there.

    Raises:
        ConfigError: as by `require_trainable_without_model`, or agents have no API to call, SGLang lacks a setting
            named in rollout.sglang, or a profile or an environment is unknown.
    """
    require_trainable_without_model(recipe)
    _require_agents_api(recipe)
    recipe_settings.require_known(recipe.rollout.sglang)
    require_names(recipe, sets=recipe.evaluation.is_in_training)


def require_inputs(recipe: Recipe) -> None:
    """Check a whole run's inputs before it starts.

    Raises:
        ConfigError: as by `require_inputs_without_model`, or there is no model, or a setting does not fit it (see
            `for_trainer` and `require_fits_model`).
        UnavailableError: a model is on the Hub, which cannot be reached.
    """
    require_inputs_without_model(recipe)
    recipe = with_models(recipe)
    for_engine(recipe)
    for_trainer(recipe)
    require_fits_model(recipe, _model(recipe).path)


def require_at_launcher(recipe: Recipe) -> None:
    """Check what the launcher of a run uses itself, if engines, workers and trainer may be on other hosts.

    Raises:
        ConfigError: the sampling cannot be trained on, the learning rate's schedule does not fit into the steps, a name
            is unknown, agents have no API to call, or the router needs a model that is not here.
        UnavailableError: a model is on the Hub, which cannot be reached.
    """
    recipe.sampling.require_trainable()
    _require_schedule(recipe)
    _require_agents_api(recipe)
    require_names(recipe, sets=recipe.evaluation.is_in_training)
    for_router(recipe)


def pin_inputs(recipe: Recipe, *, with_sets: bool, with_demonstrations: bool = False) -> Recipe:
    """Return the recipe with the Hugging Face Hub commits of its data pinned.

    Args:
        recipe: The recipe.
        with_sets: Whether to pin its evaluation sets too.
        with_demonstrations: Whether to pin its demonstrations too.

    Raises:
        DataError: there is no such data set, revision, configuration or split.
        UnavailableError: the Hub cannot be reached, and its cache has no copy.
    """
    pinned: dict[str, Any] = {"data": pin(recipe.data)}
    if with_sets:
        pinned["evaluation"] = pin_sets(recipe.evaluation, recipe.data)
    if with_demonstrations and recipe.demonstrations is not None:
        with named_section("demonstrations"):
            pinned["demonstrations"] = pin(recipe.demonstrations)
    return recipe.model_copy(update=pinned)


def require_template_variables(
    recipe: Recipe, model: Path | None, *, with_sets: bool, with_demonstrations: bool = False
) -> None:
    """Check that a model's chat template reads the variables that the recipe's data set.

    Args:
        recipe: The recipe whose `chat_template_kwargs` are checked.
        model: Folder of the model; None: its template is unknown, and only reserved names are rejected.
        with_sets: Whether evaluation sets are played.
        with_demonstrations: Whether steps learn demonstrations beside groups.

    Raises:
        ConfigError: the template does not read one, or the name is reserved.
        SetupError: transformers is not installed.
    """
    sets = recipe.evaluation.sets if with_sets else {}
    learned = recipe.demonstrations if with_demonstrations else None
    given = {  # [data] comes first, because the others inherit it
        **_template_variables("data", recipe.data),
        **{f"evaluation.sets.{name}": each.chat_template_kwargs for name, each in sets.items()},
        **({} if learned is None else _template_variables("demonstrations", learned)),
    }
    if not any(given.values()):
        return
    import_with_extra("transformers", "data.chat_template_kwargs", extra="trainer")
    from penstock.model.chat.chat_template import Renderer

    require = require_free if model is None else Renderer.load(model).require_variables
    for section, names in given.items():
        try:
            require(names)
        except InvalidRequestError as error:
            raise ConfigError(f"{section}.{error}") from None


def _template_variables(section: str, data: DataConfig) -> dict[str, Mapping[str, object]]:
    """What a section and its sources set, by their names."""
    return {
        section: data.chat_template_kwargs,
        **{f"{section}.sources.{name}": source.chat_template_kwargs for name, source in data.sources.items()},
    }


def _require_files(recipe: Recipe, *, with_sets: bool, with_demonstrations: bool = False) -> None:
    for source in recipe.data.by_name.values():
        require_files(source)
    if with_sets:
        require_sets(recipe.evaluation)
    if with_demonstrations and recipe.demonstrations is not None:
        require_demonstrations(recipe.demonstrations)


def _require_reference(recipe: Recipe) -> None:
    reference = recipe.algorithm.kl.reference
    if reference is not None:
        with named_section("algorithm.kl.reference"):
            require_model(reference)
            require_same_tokens(_model(recipe).path, reference)


def _model(recipe: Recipe) -> ModelConfig:
    if recipe.model is None:
        raise ConfigError(
            "section [model] is missing; add it to the recipe that --config names, or give --model.path=, the folder "
            "of a transformers checkpoint or a model on the Hugging Face Hub"
        )
    require_model(recipe.model.path)
    return recipe.model


def _address(recipe: Recipe, given: str, port: int, service: str) -> str:
    if not given and port == 0:
        raise ConfigError(
            f"worker.{service}_address is empty and {service}.port is 0; give --worker.{service}_address=host:port, "
            f"or --{service}.port=..."
        )
    return given or f"{recipe.network.local}:{port}"


def _require_agents_api(recipe: Recipe) -> None:
    if recipe.worker.agents:
        _router_url(recipe)


def _router_url(recipe: Recipe) -> str:
    """Return the address of the router's OpenAI-compatible API for agents."""
    if recipe.worker.router_url:
        return recipe.worker.router_url
    if not recipe.router.http_port:
        raise ConfigError(
            "worker.agents needs the router's OpenAI-compatible API, and router.http_port is "
            f"{recipe.router.http_port}; set it to a port, or give --worker.router_url=http://host:port"
        )
    security = recipe.security
    scheme = "http" if security.tls_cert is None and security.tls_ca is None else "https"
    return f"{scheme}://{recipe.network.local}:{recipe.router.http_port}"
