"""Each service receives its part of the recipe, and only what it uses must be there."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.config import ModelConfig, NetworkConfig, SamplingConfig, SecurityConfig
from penstock.errors import ConfigError
from services.launch.settings import run_inputs, service_settings
from services.recipe import Recipe
from services.reward.config import RewardConfig
from services.rollout.engine.config import RolloutConfig
from services.rollout.engine.sglang.settings import server_args
from services.rollout.worker.agents.config import AgentConfig
from services.rollout.worker.config import WorkerConfig
from services.router.config import RouterConfig
from services.trainer.config import TrainerConfig
from services.trainer.data.config import DataConfig


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    """A model folder with nothing but its configuration."""
    (tmp_path / "config.json").write_text("{}")
    return ModelConfig(path=tmp_path)


NOWHERE = ModelConfig(path=Path("/nowhere"))


@pytest.mark.parametrize(
    "build", [service_settings.for_engine, service_settings.for_worker, service_settings.for_trainer]
)
def test_engine_worker_and_trainer_need_the_model(build) -> None:
    """The error names the setting and the remedy."""
    with pytest.raises(ConfigError, match=r"section \[model\] is missing; add it .*--model\.path="):
        build(Recipe())
    with pytest.raises(
        ConfigError, match=r"model\.path = '/nowhere': this folder has no config\.json; give the folder"
    ):
        build(Recipe(model=NOWHERE))


def test_only_the_trainer_needs_the_data(model: ModelConfig) -> None:
    """Workers and engines may run on machines that do not have the file."""
    recipe = Recipe(model=model, data=DataConfig(path="/no/such.parquet"))
    service_settings.for_engine(recipe)
    with pytest.raises(
        ConfigError, match=r"data\.path = '/no/such\.parquet': there is no such file; give a file \(\.parquet"
    ):
        service_settings.for_trainer(recipe)
    with pytest.raises(ConfigError, match="no such file"):
        run_inputs.require_inputs(recipe)


def test_only_experts_that_are_there_are_divided_as_wholes(model: ModelConfig) -> None:
    """And evenly; before anything is started."""
    rollout = RolloutConfig(tensor_parallel=4, expert_parallel=4)
    for config, reason in (
        ({"model_type": "qwen3"}, "is for mixtures of experts, and model.path has a dense model"),
        ({"model_type": "qwen3_moe", "num_experts": 6}, "does not divide the model's 6 experts"),
    ):
        (model.path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ConfigError, match=rf"rollout\.expert_parallel = 4 {reason}"):
            service_settings.for_engine(Recipe(model=model, rollout=rollout))
    (model.path / "config.json").write_text(
        json.dumps({"model_type": "qwen3_vl_moe", "text_config": {"num_experts": 8}})
    )
    assert service_settings.for_engine(Recipe(model=model, rollout=rollout)).rollout == rollout


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 50}])
def test_a_cut_distribution_cannot_be_trained_on(model: ModelConfig, cut: dict[str, float]) -> None:
    """A run refuses it before it starts; engines alone may sample so."""
    recipe = Recipe(model=model, sampling=SamplingConfig.model_validate(cut))
    service_settings.for_engine(recipe)
    for build in (service_settings.for_trainer, run_inputs.require_inputs):
        with pytest.raises(ConfigError, match=r"sampling\.top_[pk] = .* cannot be trained on; set"):
            build(recipe)


def test_the_router_needs_a_model_only_for_its_openai_compatible_api(model: ModelConfig) -> None:
    """It starts on machines without the model, and takes the tokenizer from it only where text is spoken."""
    assert service_settings.for_router(Recipe(model=NOWHERE)).model == NOWHERE
    with pytest.raises(ConfigError, match=r"model\.path = '/nowhere'"):
        service_settings.for_router(Recipe(model=NOWHERE, router=RouterConfig(http_port=0)))
    assert service_settings.for_router(Recipe(model=model, router=RouterConfig(http_port=0))).model == model


def test_a_worker_finds_router_and_reward_service_on_its_machine(model: ModelConfig) -> None:
    """By their ports, unless addresses are given; without either, the error names both settings."""
    found = Recipe(
        model=model,
        router=RouterConfig(port=7001),
        reward=RewardConfig(port=7002),
        rollout=RolloutConfig(context_length=99),
    )
    settings = service_settings.for_worker(found)
    assert (settings.router_address, settings.reward_address) == ("127.0.0.1:7001", "127.0.0.1:7002")
    assert settings.context_length == 99
    listening = found.model_copy(update={"network": NetworkConfig(host="10.0.0.5")})
    assert service_settings.for_worker(listening).router_address == "10.0.0.5:7001"
    given = found.model_copy(update={"worker": found.worker.model_copy(update={"router_address": "elsewhere:1"})})
    assert service_settings.for_worker(given).router_address == "elsewhere:1"
    with pytest.raises(
        ConfigError, match=r"worker\.router_address is empty and router\.port is 0; give --worker\.router"
    ):
        service_settings.for_worker(Recipe(model=model))
    with pytest.raises(ConfigError, match=r"worker\.reward_address is empty and reward\.port is 0"):
        service_settings.for_worker(Recipe(model=model, router=RouterConfig(port=1)))


def test_a_worker_with_agents_finds_the_routers_http_api(model: ModelConfig) -> None:
    """By its port, unless a URL is given; agents without either are refused, and others need neither."""
    agents = WorkerConfig(agents={"a": AgentConfig(function="os:getcwd")})
    reward, router = RewardConfig(port=7002), RouterConfig(port=7001, http_port=7080)
    found = Recipe(model=model, worker=agents, reward=reward, router=router)
    assert service_settings.for_worker(found).router_url == "http://127.0.0.1:7080"
    secured = found.model_copy(update={"security": SecurityConfig(tls_ca=Path("ca.pem"))})
    assert service_settings.for_worker(secured).router_url == "https://127.0.0.1:7080"
    given = found.model_copy(update={"worker": agents.model_copy(update={"router_url": "http://elsewhere:1"})})
    assert service_settings.for_worker(given).router_url == "http://elsewhere:1"
    without = found.model_copy(update={"router": RouterConfig(port=7001)})
    with pytest.raises(
        ConfigError, match=r"worker\.agents needs .* router\.http_port is None; set it to a port, or give"
    ):
        service_settings.for_worker(without)
    with pytest.raises(ConfigError, match=r"router\.http_port is None; set it to a port"):
        run_inputs.require_at_launcher(without)
    assert service_settings.for_worker(without.model_copy(update={"worker": WorkerConfig()})).router_url == ""


@pytest.mark.parametrize(
    "url",
    [
        "router:7080",
        "http://router:http",
        "http://:7080",
        "ftp://router:7080",
        "http://router:7080/v1/",
        "http://r:7080/v1/chat",
        "http://r:7080?x",
        "http://r\n:7080",
    ],
)
def test_agents_get_a_url_that_they_can_call(url: str) -> None:
    """A wrong one would fail every sample with no more than "Connection error."; a router may stand behind a path."""
    with pytest.raises(ValueError, match=r"router_url\n.* must be http://host:port or https://host:port, without /v1"):
        WorkerConfig(router_url=url)
    for right in ("", "https://router", "http://router:7080/", "http://ingress/penstock"):
        assert WorkerConfig(router_url=right).router_url == right


@pytest.mark.parametrize("is_set", [True, False])
def test_trainer_and_engines_agree_on_the_head(model: ModelConfig, is_set: bool) -> None:
    """One setting for both sides, under the name that SGLang knows it by."""
    recipe = Recipe(model=model, trainer=TrainerConfig(float32_head=is_set), rollout=RolloutConfig(context_length=64))
    received = service_settings.for_engine(recipe)
    assert service_settings.for_trainer(recipe).trainer.float32_head is is_set
    args = server_args(
        received.rollout,
        received.network,
        model.path,
        float32_head=received.float32_head,
        bootstrap_port=0,
        cuda=True,
    )
    assert args["enable_fp32_lm_head"] is is_set


MIXTURE = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 3}


@pytest.mark.parametrize("is_set", [True, False])
def test_trainer_workers_and_engines_agree_on_whose_experts_are_taken(model: ModelConfig, is_set: bool) -> None:
    """One setting: engines record the experts, workers ask for them, the trainer takes them."""
    (model.path / "config.json").write_text(json.dumps(MIXTURE))
    services = {"router": RouterConfig(port=7001), "reward": RewardConfig(port=7002)}
    rollout = RolloutConfig(context_length=64)
    recipe = Recipe(model=model, trainer=TrainerConfig(router_replay=is_set), rollout=rollout, **services)
    received = service_settings.for_engine(recipe)
    args = server_args(
        received.rollout,
        received.network,
        model.path,
        float32_head=False,
        router_replay=received.router_replay,
        bootstrap_port=0,
        cuda=True,
    )
    assert args["enable_return_routed_experts"] is is_set
    assert service_settings.for_worker(recipe).router_replay is is_set
    assert service_settings.for_trainer(recipe).trainer.router_replay is is_set


@pytest.mark.parametrize("build", [service_settings.for_engine, service_settings.for_trainer])
def test_a_dense_model_has_no_routing_to_replay(build: Any, model: ModelConfig) -> None:
    """Engines and trainer say so before they load it."""
    recipe = Recipe(model=model, trainer=TrainerConfig(router_replay=True), rollout=RolloutConfig(context_length=64))
    with pytest.raises(ConfigError, match=r"router_replay = true is for mixtures of experts, .* leave it out"):
        build(recipe)


@pytest.mark.parametrize("rollout", [{"prefill": 1, "decode": 1}, {"role": "decode"}, {"role": "prefill"}])
def test_pairs_do_not_replay_routing(rollout: dict[str, Any]) -> None:
    """No engine of a pair knows the experts of a whole sequence."""
    with pytest.raises(ValueError, match=r"router_replay = true does not go with prefill and decode engines"):
        Recipe.model_validate({"trainer": {"router_replay": True}, "rollout": rollout})


def test_a_server_of_environments_serves_those_of_its_recipe_that_are_not_elsewhere() -> None:
    """Others must be named; one that is at another server cannot be."""
    tables = {"maze": "my.maze:Maze", "robot": {"url": "http://robots:7010"}}

    def served(**server: object) -> tuple[str, ...]:
        recipe = Recipe.model_validate({"worker": {"environments": tables}, "environment_server": server})
        return service_settings.for_environments(recipe).server.names

    assert served() == ("maze",)
    assert served(names=["calculator"]) == ("calculator",)
    with pytest.raises(ConfigError, match=r"names has robot, which worker\.environments finds at another server"):
        served(names=["maze", "robot"])
    with pytest.raises(ConfigError, match=r"there is no environment to serve; give --worker\.environments\.NAME="):
        service_settings.for_environments(Recipe())
