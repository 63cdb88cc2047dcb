"""Takes each service's settings from a recipe: its own section and the shared ones that it uses, never the whole.

Only the settings that a service uses are checked here, so that NATS, the reward service and the router start on
machines without the model and the data.
"""

from penstock.config import ModelConfig, RunConfig
from penstock.errors import ConfigError
from penstock.model.families.experts import num_experts
from penstock.model.folder import require_model
from penstock.model.tokens import require_same_tokens
from services.launch.checks.model_fit import require_fits_model
from services.launch.checks.template_variables import require_template_variables
from services.launch.checks.training_inputs import require_supervised_without_model, require_trainable_without_model
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
from services.trainer.config import TrainerSettings
from services.trainer.data.named_section import named_section
from services.trainer.sft.config import SftSettings


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
        router_url=router_url(recipe) if worker.agents else "",
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
    require_supervised_without_model(recipe)
    recipe = with_model(recipe)
    require_template_variables(recipe, _model(recipe).path, with_sets=recipe.sft.validate_every > 0)
    settings = SftSettings(
        sft=recipe.sft,
        trainer=recipe.trainer,
        run=recipe.run,
        model=_model(recipe),
        data=recipe.data,
        trackers=recipe.trackers,
        evaluation=recipe.evaluation,
    )
    require_fits_model(recipe, settings.model.path, is_sft=True)
    return settings


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


def router_url(recipe: Recipe) -> str:
    """Return the address of the router's OpenAI-compatible API for agents.

    Raises:
        ConfigError: there is no such API, and no address of one elsewhere.
    """
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
