"""Models on the Hugging Face Hub: what is downloaded, pinned, found in the cache, and said when that fails."""

import json
import socket
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from penstock import config as configuration
from penstock import shipped
from penstock.config import ModelConfig
from penstock.errors import ConfigError, PenstockError, SetupError, UnavailableError
from penstock.model import hub as model_hub
from penstock.telemetry import log
from services.cli import main
from services.cli.evaluation import run as evaluating
from services.cli.evaluation.begun import Begun, require_same
from services.doctor.finding import Status
from services.doctor.inputs import check_model
from services.launch import launcher
from services.launch.run_folder import RunFolder
from services.launch.settings import hub_models, run_inputs, service_settings
from services.recipe import Recipe
from services.trainer.checkpoint.store import Checkpoint
from services.trainer.replay.replay import _model_folder, _with_reference
from services.trainer.replay.settings import StepSettings
from tests.support.trainer.data.hub_server import COMMIT, OLDER, HubServer, Repo, used_hub

TINY = {file.name: file.read_bytes() for file in shipped.models()["tiny-qwen3-vl"].iterdir()}
NEEDED = set(TINY) - {"README.md"}
BESIDE = {
    "README.md": b"a card",
    "pytorch_model.bin": b"0" * 100,
    "onnx/model.safetensors": b"0" * 100,
    "original/config.json": b"{}",
}
REPOS = {
    "owner/tiny": Repo(
        commits={COMMIT: {**TINY, **BESIDE}, OLDER: {**TINY, "added_tokens.json": b"{}"}},
        branches={"main": COMMIT, "v1": OLDER},
        num_parameters=1_104_320,
    ),
    "owner/gated": Repo(commits={}, refusal="GatedRepo"),
    "owner/expired": Repo(commits={}, status=401),
    "owner/forbidden": Repo(commits={}, status=403),
    "owner/busy": Repo(commits={}, status=429),
    "owner/down": Repo(commits={}, status=503),
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A Hub on this machine, and an empty cache."""
    monkeypatch.chdir(tmp_path)
    with used_hub(REPOS, tmp_path, monkeypatch) as server:
        yield server


def recipe(*overrides: str, model: str = "owner/tiny") -> Recipe:
    """One whose model is on the Hub."""
    return configuration.load(Recipe, [shipped.named_recipe("tiny-cpu")], [f"--model.path={model}", *overrides])


def files_of(folder: Path) -> set[str]:
    """Names of the files in it."""
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}


def test_what_a_model_needs_is_downloaded_and_nothing_else(hub: HubServer) -> None:
    """Weights, configuration, tokenizer, processor and template; no other format of the same weights."""
    folder = model_hub.fetch(Path("owner/tiny"))
    assert files_of(folder) == NEEDED
    assert (folder / "model.safetensors").read_bytes() == TINY["model.safetensors"]
    assert files_of(model_hub.fetch(Path("owner/tiny@v1"))) == NEEDED | {"added_tokens.json"}
    assert model_hub.fetch(folder) == folder


def test_workers_and_routers_download_no_weights(hub: HubServer) -> None:
    """They render prompts; an engine in the same place fetches the rest into the same folder."""
    settings = recipe("--router.http_port=0", "--router.port=7001", "--reward.port=7002")
    worker, router = service_settings.for_worker(settings), service_settings.for_router(settings)
    assert files_of(worker.model.path) == NEEDED - {"model.safetensors"}
    assert router.model == worker.model
    assert not [path for path in hub.requests if path.endswith("model.safetensors")]
    assert service_settings.for_engine(settings).model == worker.model
    assert files_of(worker.model.path) == NEEDED


def test_a_recipe_that_is_written_has_the_commit(hub: HubServer) -> None:
    """Not this machine's cache: every service finds the same files, though the branch has moved."""
    given = recipe("--algorithm.kl.kind=k2", "--algorithm.kl.reference=owner/tiny@v1")
    written = tomllib.loads(configuration.dump(hub_models.with_models(given)))
    assert written["model"]["path"] == f"owner/tiny@{COMMIT}"
    assert written["algorithm"]["kl"]["reference"] == f"owner/tiny@{OLDER}"
    hub.repos["owner/tiny"] = Repo(commits=REPOS["owner/tiny"].commits, branches={"main": OLDER})
    hub.requests.clear()
    again = Recipe.model_validate(written)
    assert service_settings.for_engine(again).model.path.name == COMMIT
    trainer = service_settings.for_trainer(again)
    assert trainer.algorithm.kl.reference is not None
    assert (trainer.model.path.name, trainer.algorithm.kl.reference.name) == (COMMIT, OLDER)
    assert hub.requests == []
    elsewhere = Path(f"/elsewhere/models--owner--tiny/snapshots/{COMMIT}")
    assert ModelConfig(path=elsewhere).model_dump(mode="json")["path"] == str(elsewhere)


def test_a_recorded_reference_is_found_again(hub: HubServer) -> None:
    """By a replay, whose settings name it as the run's recipe does."""
    algorithm = recipe("--algorithm.kl.kind=k2", "--algorithm.kl.reference=owner/tiny@v1").algorithm
    found = _with_reference(algorithm).kl.reference
    assert found is not None
    assert files_of(found) >= NEEDED


def test_a_replay_of_adapters_finds_their_base(hub: HubServer, tmp_path: Path) -> None:
    """Their checkpoints have none; where a checkpoint has the whole model, nobody asks for the one before."""
    before = Checkpoint(step=1, path=tmp_path / "step-000001", state={})

    def found(*overrides: str) -> Path:
        of_run = recipe(*overrides)
        assert of_run.model is not None
        settings = StepSettings.of(
            model_path=of_run.model.path,
            seed=0,
            temperature=1.0,
            trainer=of_run.trainer,
            algorithm=of_run.algorithm,
            filters=of_run.filters,
        )
        return _model_folder(before, settings, settings.model.path)

    assert found() == before.model_path
    assert hub.requests == []
    assert files_of(found("--trainer.lora.rank=8")) >= NEEDED


def test_offline_reads_the_cache_and_asks_nobody(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """HF_HUB_OFFLINE: what was fetched before is there, what was not is named with the command that fetches it."""
    fetched = model_hub.fetch(Path("owner/tiny"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    for path in ("owner/tiny", f"owner/tiny@{COMMIT}"):
        assert model_hub.fetch(Path(path)) == fetched
    for path, command in (
        ("owner/other", "hf download owner/other`"),
        ("owner/tiny@v1", "hf download owner/tiny --revision v1`"),
    ):
        with pytest.raises(SetupError, match=f"HF_HUB_OFFLINE is set, and the cache has no complete copy; .*{command}"):
            model_hub.fetch(Path(path))
    assert hub.requests == []


def test_a_model_without_its_weights_is_no_complete_copy(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """`penstock plan` and workers leave such a one in the cache."""
    model_hub.fetch(Path("owner/tiny"), with_weights=False)
    assert model_hub.find_cached(Path("owner/tiny")) is None
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        with pytest.raises(UnavailableError, match=r"it cannot be reached, and the cache has no complete copy"):
            model_hub.fetch(Path("owner/tiny"))
        assert model_hub.fetch(Path("owner/tiny"), with_weights=False).name == COMMIT


def test_a_download_that_ended_early_is_no_complete_copy(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its names of parameters are not all of the model's, so that nothing is checked against them."""
    folder = model_hub.fetch(Path("owner/tiny"))
    files = {"a.weight": "model.safetensors", "b.weight": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert model_hub.find_cached(Path("owner/tiny")) is None
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SetupError, match="HF_HUB_OFFLINE is set, and the cache has no complete copy"):
        model_hub.fetch(Path("owner/tiny"))
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"")
    assert model_hub.find_cached(Path("owner/tiny")) == folder


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("owner/nothing", "neither a folder here nor a model on the .* check the name, and for a private one"),
        ("owner/a--b..c", "neither a folder here nor a model on the"),
        ("owner/gated", "is gated; accept its terms on its page, then run `hf auth login`"),
        ("owner/tiny@v9", "has no revision 'v9'; give a branch, a tag or a commit"),
    ],
)
def test_what_cannot_be_fetched_is_said_in_a_line(hub: HubServer, path: str, words: str) -> None:
    """With the setting and what to do about it."""
    for setting, settings in (
        ("model.path", recipe(model=path)),
        ("algorithm.kl.reference", recipe("--algorithm.kl.kind=k2", f"--algorithm.kl.reference={path}")),
    ):
        with pytest.raises(ConfigError, match=f"^{setting} = '{path}'.*{words}") as caught:
            run_inputs.require_inputs(settings)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("owner/nothing", 2),
        ("owner/gated", 2),
        ("owner/expired", 2),
        ("owner/forbidden", 2),
        ("owner/tiny@v9", 2),
        ("owner/busy", 1),
        ("owner/down", 1),
    ],
)
def test_only_what_a_person_must_change_ends_with_2(hub: HubServer, path: str, code: int) -> None:
    """What supervises a process starts it again after 1: a Hub with a fault of its own answers later."""
    assert main(["serve", "trainer", "--config", "tiny-cpu", f"--model.path={path}"]) == code


@pytest.mark.parametrize(
    ("endpoint", "code"), [("http://127.0.0.1:1", 1), ("http://nowhere.invalid", 1), ("nowhere", 2)]
)
def test_a_hub_out_of_reach_may_be_back_later(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, endpoint: str, code: int
) -> None:
    """A name that does not resolve too; an address without a scheme never will."""
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    assert main(["serve", "trainer", "--config", "tiny-cpu", "--model.path=owner/tiny"]) == code
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert main(["serve", "trainer", "--config", "tiny-cpu", "--model.path=owner/tiny"]) == 2


def test_without_huggingface_hub_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A router without the OpenAI-compatible API has no such package, and needs no model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    service_settings.for_router(recipe())
    with pytest.raises(SetupError, match=r"needs the Python package 'huggingface_hub'.*pip install 'penstock\["):
        service_settings.for_engine(recipe())


def test_a_dry_run_downloads_nothing(hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    """It says what a run would fetch; what the cache has is checked."""
    command = ["train", "tiny-cpu", "--dry-run", "--model.path=owner/tiny"]
    assert main(command) == 0
    assert "model.path owner/tiny would be fetched from the Hugging Face Hub; it was not checked" in (
        capsys.readouterr().out
    )
    assert hub.requests == []
    model_hub.fetch(Path("owner/tiny"))
    assert main(command) == 0
    assert "would be fetched" not in capsys.readouterr().out
    assert main([*command, "--trainer.ranks=2", "--trainer.expert_parallel=2"]) == 2
    assert main([*command, "--model.path=owner/nothing", "--data.path=/no/such.parquet"]) == 2
    assert "no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("commands", "override", "words"),
    [
        ("train sft", "--trainer.device=cuda", "trainer.device = 'cuda', and no GPU can be used"),
        ("train eval", "--rollout.tensor_parallel=2", "rollout.tensor_parallel = 2: no GPU can be used"),
        ("train eval", "--rollout.sglang.chunked_prefil_size=1", "did you mean chunked_prefill_size?"),
        ("train", "--data.profile=mth", "data.profile = 'mth' is unknown"),
        ("eval", "--evaluation.sets.held_out.profile=mth", "evaluation.sets.held_out.profile = 'mth' is unknown"),
        ("train", "--worker.agents.mine.function=mine:run", "worker.agents needs the router's OpenAI-compatible API"),
        ("train eval", "--security.tls_ca=/no/ca.pem", "/no/ca.pem"),
        ("sft", "--trainer.record_groups=true", "supervised training has none; leave it out"),
    ],
)
def test_what_is_wrong_with_any_model_is_refused_before_a_download(
    hub: HubServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    commands: str,
    override: str,
    words: str,
) -> None:
    """Models are gigabytes."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in commands.split():
        for option in ([], ["--dry-run"]) if name == "train" else ([],):
            assert main([name, "tiny-cpu", "--model.path=owner/tiny", override, *option]) == 2
            assert words in capsys.readouterr().err
    assert hub.requests == []


def test_train_keeps_the_commit_and_starts_nothing_without_the_model(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run folder is made once the model is there; resuming asks the Hub nothing."""
    launched: list[Recipe] = []

    async def launch(settings: Recipe, *_: object, **__: object) -> None:
        """Nothing: the run is over at once."""
        launched.append(settings)

    monkeypatch.setattr(launcher, "launch", launch)
    monkeypatch.setattr(log, "configure", lambda *_, **__: None)
    command = ["train", "tiny-cpu", f"--run.dir={tmp_path}/runs"]
    assert main([*command, "--model.path=owner/nothing"]) == 2
    assert "check the name, and for a private one" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    assert main([*command, "--model.path=owner/tiny"]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert tomllib.loads((folder / "config.toml").read_text())["model"]["path"] == f"owner/tiny@{COMMIT}"
    hub.requests.clear()
    assert main(["train", "--resume", str(folder)]) == 0
    assert hub.requests == []
    assert [each.model.path.name for each in launched if each.model] == [COMMIT, COMMIT]


def test_eval_takes_a_model_of_the_hub(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As --model, and as the recipe's; with --url none is fetched."""
    played: list[Recipe] = []

    def evaluate(settings: Recipe, *_: object, **__: object) -> int:
        played.append(settings)
        return 0

    monkeypatch.setattr(evaluating, "evaluate", evaluate)
    assert main(["eval", "tiny-cpu", "--model.path=owner/tiny", "--url=http://127.0.0.1:1/v1"]) == 0
    assert hub.requests == []
    assert main(["eval", "tiny-cpu", "--model=owner/tiny@v1"]) == 0
    assert main(["eval", "tiny-cpu", "--model.path=owner/tiny"]) == 0
    models = [each.model for each in played[1:] if each.model]
    assert [each.path.name for each in models] == [OLDER, COMMIT]
    assert Begun.with_engines(models[0].path, "now").model_name == f"owner/tiny@{OLDER}"


def test_an_evaluation_over_an_api_goes_on_without_the_recipes_model(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing ever read it, so that its config.toml names no commit: neither is it fetched, nor does it differ."""
    begun = Begun(started_at="now", model="m at http://127.0.0.1:1/v1", url="http://127.0.0.1:1/v1", url_model="m")
    folder = tmp_path / "begun"
    folder.mkdir()
    begun.write(folder)
    (folder / "config.toml").write_text(configuration.dump(recipe("--evaluation.sets.s.profile=math")))

    def evaluate(settings: Recipe, *_: object, folder: RunFolder, **__: object) -> int:
        require_same(begun, folder.path, before=configuration.load(Recipe, [folder.config_file]), now=settings)
        return 0

    monkeypatch.setattr(evaluating, "evaluate", evaluate)
    assert main(["eval", f"--resume={folder}"]) == 0
    assert hub.requests == []


def test_plan_needs_no_weights(hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that does not fit need not be downloaded to know it."""
    command = ["plan", "tiny-cpu", "--json", "--model.path=owner/tiny", "--rollout.replicas=1", "--gpus=2x4"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["num_parameters"] == 1_104_320
    assert not [path for path in hub.requests if path.endswith("model.safetensors")]


def test_doctor_asks_the_hub_and_downloads_nothing(hub: HubServer) -> None:
    """The size is known before, so that memory is checked; a model in the cache is looked at like any folder."""

    def found(**given: Any) -> Any:
        return check_model(recipe(**given))

    finding, size = found()
    assert (finding.status, size.num_parameters) == (Status.OK, 1_104_320)
    assert size.checkpoint_bytes == len(TINY["model.safetensors"])
    assert "1.1 million parameters" in finding.seen
    assert not [path for path in hub.requests if "/resolve/" in path]
    finding, size = found(model="owner/nothing")
    assert (finding.status, size) == (Status.FAULT, None)
    assert "check the name" in finding.remedy
    model_hub.fetch(Path("owner/tiny"))
    finding, _ = found()
    assert "qwen3_vl, 1.1 million parameters" in finding.seen


def test_a_folder_is_never_looked_for_on_the_hub(hub: HubServer, tmp_path: Path) -> None:
    """Even one whose path has the form of an id; a path that cannot be an id is not asked for either."""
    (tmp_path / "owner" / "tiny").mkdir(parents=True)
    for path in ("owner/tiny", "/owner/tiny", "a/b/c", "models"):
        assert model_hub.fetch(Path(path)) == Path(path)
        with pytest.raises(PenstockError, match=r"this folder has no config\.json; give .* or a model on the"):
            service_settings.for_engine(recipe(model=path))
    assert hub.requests == []
