"""A recipe is read strictly; every message names the key, the value and the remedy."""

import pwd
import re
import socket
from pathlib import Path
from typing import Any

import pydantic
import pytest

from penstock.config import BusConfig, Config, ModelConfig, NetworkConfig, RunConfig, SamplingConfig, load
from penstock.documented import field_docstrings
from penstock.errors import ConfigError
from services.recipe import Recipe


class InnerConfig(Config):
    """A section inside a section."""

    rate: float = 0.5
    """A number."""


class OuterConfig(Config):
    """A section."""

    inner: InnerConfig = InnerConfig()
    """A section."""
    count: int = pydantic.Field(default=1, ge=1)
    """A count."""
    names: tuple[str, ...] = ()
    """Names."""
    paths: str | tuple[str, ...] = ""
    """A path, or several."""
    shares: tuple[float, float] = (0.5, 0.5)
    """Two numbers."""


class FileConfig(Config):
    """A whole file."""

    run: RunConfig = RunConfig()
    """The run."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling."""
    outer: OuterConfig = OuterConfig()
    """Something nested."""
    tables: dict[str, InnerConfig] = pydantic.Field(default_factory=dict)
    """Sections with names of a person's choice."""


class NeedyConfig(Config):
    """A file with a section that has no default."""

    model: ModelConfig
    """The model."""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text('[run]\nname = "geo"\nseed = 3\n[outer.inner]\nrate = 0.25\n')
    return path


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return path


def test_reads_the_file_and_fills_in_defaults(recipe: Path) -> None:
    """What the file says, else the defaults."""
    config = load(FileConfig, [recipe])
    assert (config.run.name, config.run.seed, config.run.dir) == ("geo", 3, Path("runs"))
    assert (config.outer.inner.rate, config.outer.count) == (0.25, 1)


@pytest.mark.parametrize(
    ("override", "get", "value"),
    [
        ("--run.seed=7", lambda c: c.run.seed, 7),
        ("--run.name=other-run", lambda c: c.run.name, "other-run"),
        ('--run.name="quoted"', lambda c: c.run.name, "quoted"),
        ("--run.dir=/tmp/a=b", lambda c: str(c.run.dir), "/tmp/a=b"),
        ("--outer.inner.rate=1e-3", lambda c: c.outer.inner.rate, 1e-3),
        ('--outer.names=["a", "b"]', lambda c: c.outer.names, ("a", "b")),
        ("--sampling.top_p=0.9", lambda c: c.sampling.top_p, 0.9),
        ("--run.name=123", lambda c: c.run.name, "123"),
        ("--run.name=2026-11-21", lambda c: c.run.name, "2026-11-21"),
        ("--run.name=true", lambda c: c.run.name, "true"),
        ("--run.dir=2026", lambda c: str(c.run.dir), "2026"),
        ("--outer.paths=2026", lambda c: c.outer.paths, "2026"),
        ("--outer.paths=2026-11-21", lambda c: c.outer.paths, "2026-11-21"),
        ("--outer.paths=[2026-11-21]", lambda c: c.outer.paths, ("2026-11-21",)),
        ("--outer.paths=[2026, 2025]", lambda c: c.outer.paths, ("2026", "2025")),
        ("--outer.names=[1, 2]", lambda c: c.outer.names, None),
        ("--outer.names=[a]", lambda c: c.outer.names, ("a",)),
        ("--outer.names=[a, b/c.d]", lambda c: c.outer.names, ("a", "b/c.d")),
        ("--outer.paths=[2026-11-21,x]", lambda c: c.outer.paths, ("2026-11-21", "x")),
        ("--outer.shares=[0.9,.95]", lambda c: c.outer.shares, (0.9, 0.95)),
    ],
)
def test_overrides_go_before_the_file(recipe: Path, override: str, get, value: object) -> None:
    """Values are read as TOML, as lists without quotes, and as plain text where they are neither or text is wanted."""
    if value is None:
        with pytest.raises(ConfigError, match=r"outer\.names\.0 = '1': Input should be a valid string"):
            load(FileConfig, [recipe], [override])
        return
    assert get(load(FileConfig, [recipe], [override])) == value


@pytest.mark.parametrize(
    ("key", "get"),
    [
        ("run.dir", lambda c: c.run.dir),
        ("run.folder", lambda c: c.run.folder),
        ("model.path", lambda c: c.model.path),
        ("data.path", lambda c: Path(c.data.path)),
        ("data.image_folder", lambda c: c.data.image_folder),
        ("data.cache_dir", lambda c: c.data.cache_dir),
        ("data.sources.own.path", lambda c: Path(c.data.sources["own"].path)),
        ("evaluation.sets.own.path", lambda c: Path(c.evaluation.sets["own"].path)),
        ("demonstrations.path", lambda c: Path(c.demonstrations.path)),
        ("algorithm.kl.reference", lambda c: c.algorithm.kl.reference),
        ("trainer.weight_sync.files_dir", lambda c: c.trainer.weight_sync.files_dir),
        ("security.tls_ca", lambda c: c.security.tls_ca),
        ("reward.verifiers.own", lambda c: Path(c.reward.verifiers["own"])),
    ],
)
def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch, key: str, get: Any) -> None:
    """In every setting that is a path; shells leave it as it is after `=`."""
    monkeypatch.setenv("HOME", "/home/me")
    user = pwd.getpwuid(0)
    kind = "--algorithm.kl.kind=k3"
    for given, path in (("~/x", "/home/me/x"), (f"~{user.pw_name}/x", f"{user.pw_dir}/x"), ("x/~", "x/~")):
        assert get(load(Recipe, [], [kind, f"--{key}={given}"])) == Path(path)
    with pytest.raises(ConfigError, match=re.escape(f"{key} = '~no-one/x': no home folder is known for '~no-one'")):
        load(Recipe, [], [kind, f"--{key}=~no-one/x"])


def test_a_tilde_in_a_list_of_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each; rows are selected as ever."""
    monkeypatch.setenv("HOME", "/home/me")
    recipe = load(Recipe, [], ['--data.path=["~/a.jsonl@[:10]", "b/*.jsonl"]'])
    assert recipe.data.path == ("/home/me/a.jsonl@[:10]", "b/*.jsonl")


def test_an_empty_path_is_not_the_working_directory() -> None:
    """As of a variable that is not set: what can be unset is, and TLS is not switched off by it."""
    unset = ("run.folder", "data.image_folder", "data.cache_dir", "algorithm.kl.reference")
    unset += ("trainer.weight_sync.files_dir",)
    assert load(Recipe, [], ["--algorithm.kl.kind=k3", *(f"--{key}=" for key in unset)]) == load(
        Recipe, [], ["--algorithm.kl.kind=k3"]
    )
    for key in ("run.dir", "model.path", "security.tls_ca"):
        with pytest.raises(ConfigError, match=f"^{key} = '': is empty; give a path$"):
            load(Recipe, [], [f"--{key}="])


def test_the_last_override_wins(recipe: Path) -> None:
    """As on every command line."""
    assert load(FileConfig, [recipe], ["--run.seed=1", "--run.seed=2"]).run.seed == 2


def test_an_override_can_begin_a_section_that_the_file_has_not(recipe: Path) -> None:
    """[sampling] is not in the file."""
    assert load(FileConfig, [recipe], ["--sampling.top_k=5"]).sampling.top_k == 5


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.seed=1", r"argument 'run.seed=1' is not an override; write --section.key=value"),
        ("--run.seed", r"argument '--run.seed' has no value; write --section.key=value"),
        ("--seed=1", r"argument '--seed=1' is not an override; write --section.key=value"),
        ("--run..seed=1", r"argument '--run..seed=1' is not an override"),
        ("--run.seed.x=1", r"argument '--run.seed.x=1': seed is a value, not a section"),
        ("--run.seed=soon", r"run.seed = 'soon': Input should be a valid integer"),
        ("--outer.count=0", r"outer.count = '0': Input should be greater than or equal to 1"),
        ("--run.seed=-1", r"run.seed = '-1': Input should be greater than or equal to 0"),
        (f"--run.seed={2**63}", rf"run.seed = '{2**63}': Input should be less than or equal to {2**63 - 1}"),
        ("--run.name=a b", r"run.name = 'a b': "),
        ("--sampling.temperature=0", r"sampling.temperature = '0': Input should be greater than 0"),
        ("--outer.inner=3", r"outer.inner = '3'"),
        ("--outer.names=x", r"""outer.names = 'x': give a list in brackets, such as \["x"\]$"""),
        (
            '--outer.names=["a", b]',
            r"""= '\["a", b\]': give a list in brackets, such as \["a", "b"\] or \[0.9, 0.95\]$""",
        ),
        ("--outer.shares=0.9", r"""= '0.9': give a list in brackets, such as \["a", "b"\] or \[0.9, 0.95\]$"""),
        ("--outer.shares=[0.9,x]", r"outer.shares.1 = 'x': Input should be a valid number"),
    ],
)
def test_a_wrong_override_is_explained(recipe: Path, override: str, message: str) -> None:
    """One line with the key, the value and what would be right."""
    with pytest.raises(ConfigError, match=message) as caught:
        load(FileConfig, [recipe], [override])
    assert "\n" not in str(caught.value)


def test_every_mistake_is_told_at_once(tmp_path: Path) -> None:
    """A person need not start three times."""
    path = write(tmp_path, "[run]\nnme = 1\nseed = 'x'\n[sampling]\ntop_p = 2.0\n")
    with pytest.raises(ConfigError) as caught:
        load(FileConfig, [path])
    assert str(caught.value).count(";") >= 2
    for part in ("run.nme", "run.seed = 'x'", "sampling.top_p = '2.0'"):
        assert part in str(caught.value)


def test_a_contradiction_of_several_sections_is_told_as_it_is() -> None:
    """It names the settings itself."""
    with pytest.raises(
        ConfigError, match=r"^trainer\.router_replay = true does not go with prefill and decode engines"
    ):
        load(Recipe, (), ["--trainer.router_replay=true", "--rollout.prefill=1"])


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    """With what to add."""
    with pytest.raises(ConfigError, match=r"key model is missing; add it to the recipe"):
        load(NeedyConfig, [write(tmp_path, "")])
    with pytest.raises(ConfigError, match=r"key model\.path is missing; add it to the recipe or give --model\.path="):
        load(NeedyConfig, [write(tmp_path, "[model]\n")])


def test_a_later_recipe_overrides_an_earlier(recipe: Path, tmp_path: Path) -> None:
    """Tables add to each other, everything else is replaced; overrides come last."""
    overlay = tmp_path / "overlay.toml"
    overlay.write_text('[run]\nseed = 4\n[outer]\nnames = ["b"]\n[outer.inner]\n')
    config = load(FileConfig, [recipe, overlay], ["--outer.count=2"])
    assert (config.run.name, config.run.seed) == ("geo", 4)
    assert (config.outer.inner.rate, config.outer.names, config.outer.count) == (0.25, ("b",), 2)
    assert load(FileConfig, [overlay, recipe]).run.seed == 3
    assert load(FileConfig, []) == FileConfig()


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("run.sede", "did you mean run.seed?"),
        ("rum.seed", "did you mean run?"),
        ("outer.iner.rate", "did you mean outer.inner?"),
        ("outer.inner.rat", "did you mean outer.inner.rate?"),
        ("outer.rate", "did you mean outer.inner.rate?"),
        ("run.temprature", "did you mean sampling.temperature?"),
        ("tables.any.rats", "did you mean tables.any.rate?"),
        ("sampling.zzz", "known here: max_new_tokens, temperature, top_k, top_p"),
        ("sampling.max", "did you mean sampling.max_new_tokens?"),
        ("sampling.rat", "known here: max_new_tokens, temperature, top_k, top_p"),
    ],
)
def test_a_mistyped_key_is_answered_with_what_was_meant(key: str, suggestion: str) -> None:
    """The most similar key beside it, or one that it begins; else one in another section; else what is known there."""
    with pytest.raises(ConfigError, match=r"^unknown key ") as caught:
        load(FileConfig, [], [f"--{key}=1"])
    assert str(caught.value).endswith(suggestion)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Missing, a folder, no TOML, no UTF-8: each says which file and what it should be."""
    with pytest.raises(ConfigError, match=r"recipe .*none.toml cannot be read: No such file.*give the path of a .toml"):
        load(FileConfig, [tmp_path / "none.toml"])
    with pytest.raises(ConfigError, match=r"cannot be read: Is a directory"):
        load(FileConfig, [tmp_path])
    with pytest.raises(ConfigError, match=r"is not TOML: .*line 2"):
        load(FileConfig, [write(tmp_path, "[run]\nname =\n")])
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary.toml is not TOML"):
        load(FileConfig, [binary])


@pytest.mark.parametrize(
    ("network", "advertised", "local"),
    [
        ({}, "127.0.0.1", "127.0.0.1"),
        ({"host": "10.0.0.5"}, "10.0.0.5", "10.0.0.5"),
        ({"host": "0.0.0.0"}, socket.gethostname(), "127.0.0.1"),
        ({"host": "0.0.0.0", "advertise_host": "trainer"}, "trainer", "127.0.0.1"),
    ],
)
def test_the_host_that_others_are_told(network: dict[str, str], advertised: str, local: str) -> None:
    """What is configured, else where the process listens; its machine's name where it listens on all addresses."""
    config = NetworkConfig(**network)
    assert (config.advertised, config.local) == (advertised, local)


def test_a_name_of_a_run_leaves_room_in_the_names_made_from_it() -> None:
    """NATS, the store of images and file systems bound those; the trainer would fail late, and name another fault."""
    longest = "x" * 128
    assert load(FileConfig, (), [f"--run.name={longest}"]).run.name == longest
    with pytest.raises(ConfigError, match=r"run\.name = .* at most 128 characters"):
        load(FileConfig, (), [f"--run.name={longest}x"])


@pytest.mark.parametrize("setting", ["host", "advertise_host"])
@pytest.mark.parametrize("host", ["::", "::1", "[fd00::5]", "10.0.0.5:50051"])
def test_a_host_is_no_ipv6_address_and_has_no_port(setting: str, host: str) -> None:
    """gRPC, NATS, torch and SGLang would each fail with a reason of their own, once everything has started."""
    with pytest.raises(pydantic.ValidationError, match="a name or an IPv4 address, without a port"):
        NetworkConfig(**{setting: host})


def test_configuration_cannot_be_changed(recipe: Path) -> None:
    """What a process read is what it runs with."""
    config = load(FileConfig, [recipe])
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.run.seed = 4  # type: ignore[misc]


@pytest.mark.parametrize("model", [RunConfig, NetworkConfig, BusConfig, SamplingConfig, ModelConfig])
def test_every_shared_setting_has_a_help_text(model: type[Config]) -> None:
    """Field docstrings are the help text."""
    assert model.model_fields.keys() == field_docstrings(model).keys()


def test_a_bus_has_one_server_or_several() -> None:
    """With commas between them; copies of what is stored need a cluster, of an odd number of servers."""
    assert BusConfig().servers == []
    assert not BusConfig(url="nats://a:4222").is_cluster
    several = BusConfig(url="nats://a:4222, nats://b:4222,", replicas=3)
    assert (several.servers, several.is_cluster) == (["nats://a:4222", "nats://b:4222"], True)
    with pytest.raises(pydantic.ValidationError, match="replicas = 3 needs url, the servers of a NATS cluster"):
        BusConfig(replicas=3)
    with pytest.raises(pydantic.ValidationError, match="1, 3 or 5"):
        BusConfig(url="nats://a:4222", replicas=2)  # type: ignore[arg-type]


def test_a_server_of_the_bus_without_a_scheme_has_that_of_nats() -> None:
    """As nats-py takes it; whoever asks for its address gets the one that the client connects to."""
    bus = BusConfig(url="nats1:4223, nats2,tls://nats3,NATS://[::1]:4224")
    assert bus.servers == [
        "nats://nats1:4223",
        "nats://nats2",
        "tls://nats3",
        "nats://[::1]:4224",
    ]
    assert bus.addresses == [
        ("nats1", 4223),
        ("nats2", 4222),
        ("nats3", 4222),
        ("::1", 4224),
    ]


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        ("nats://127.0.0.1:abc", "its port is not a number from 1 to 65535"),
        ("nats://127.0.0.1:99999", "its port is not a number from 1 to 65535"),
        ("nats://127.0.0.1:0", "its port is not a number from 1 to 65535"),
        ("nats://:4222", "it has no host"),
        ("nats://", "it has no host"),
        ("nats://[::1", "it is not a URL"),
        ("http://127.0.0.1:4222", "its scheme is neither nats nor tls"),
        ("wss://127.0.0.1:443", "its scheme is neither nats nor tls"),
    ],
)
def test_a_server_of_the_bus_that_no_client_can_connect_to_is_refused(server: str, reason: str) -> None:
    """Before anything starts, and by its name among several."""
    with pytest.raises(ConfigError, match=re.escape(f"bus: url names {server!r}: {reason}; write nats://host:port")):
        load(Recipe, (), [f"--bus.url=nats://nats1:4222,{server}"])
