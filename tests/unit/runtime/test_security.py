"""What is read of tokens and certificates, and where it never shows."""

from pathlib import Path

import pytest

from penstock import config as configuration
from penstock.config import SecurityConfig
from penstock.errors import ConfigError
from penstock.runtime.security import Security, read_secret
from services.recipe import Recipe

TOKEN = "b2f5ff47436671b6e533d8dc3614845d"


def test_the_token_comes_from_the_environment_or_a_file(tmp_path: Path) -> None:
    """White space around a file's is not part of it; an empty variable is none; both at once are a contradiction."""
    file = tmp_path / "token"
    file.write_text(f" {TOKEN}\n")
    assert read_secret("PENSTOCK_TOKEN", {"PENSTOCK_TOKEN": TOKEN}) == TOKEN
    assert read_secret("PENSTOCK_TOKEN", {"PENSTOCK_TOKEN": "", "PENSTOCK_TOKEN_FILE": str(file)}) == TOKEN
    assert read_secret("PENSTOCK_TOKEN", {"PENSTOCK_TOKEN": "", "PENSTOCK_TOKEN_FILE": ""}) == ""
    with pytest.raises(ConfigError, match="PENSTOCK_TOKEN and PENSTOCK_TOKEN_FILE are both set"):
        read_secret("PENSTOCK_TOKEN", {"PENSTOCK_TOKEN": TOKEN, "PENSTOCK_TOKEN_FILE": str(file)})


@pytest.mark.parametrize(("content", "said"), [(None, "No such file"), (b"\n", "is empty"), (b"\xff\xfe", "not text")])
def test_a_token_file_that_is_none_is_an_error(tmp_path: Path, content: bytes | None, said: str) -> None:
    """Never a server without a token, where somebody wanted one."""
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        read_secret("PENSTOCK_TOKEN", {"PENSTOCK_TOKEN_FILE": str(file)})


@pytest.mark.parametrize("token", ["two words", 'a"b', "naïve", "a\nb", "a,b", " "])
def test_a_token_that_cannot_be_sent_is_an_error_that_does_not_show_it(token: str) -> None:
    """It would be cut or refused on the way."""
    with pytest.raises(ConfigError, match="has characters that a token cannot have") as caught:
        read_secret("PENSTOCK_TOKEN", {"PENSTOCK_TOKEN": token})
    assert token == " " or token not in str(caught.value)


def test_nats_has_the_other_token_where_it_has_none_of_its_own() -> None:
    """One secret closes everything; a second one keeps callers of the services out of the run."""
    config = SecurityConfig()
    assert Security.load(config, {"PENSTOCK_TOKEN": "a"}).nats_token == "a"
    both = Security.load(config, {"PENSTOCK_TOKEN": "a", "PENSTOCK_NATS_TOKEN": "b"})
    assert (both.token, both.nats_token) == ("a", "b")
    assert Security.load(config, {"PENSTOCK_NATS_TOKEN": "b"}).token == ""


@pytest.mark.parametrize(
    ("given", "admitted"),
    [
        (f"Bearer {TOKEN}", True),
        (f"bearer  {TOKEN}", True),
        (TOKEN, False),
        (f"Basic {TOKEN}", False),
        (f"Bearer {TOKEN[:-1]}", False),
        (f"Bearer {TOKEN}0", False),
        (f"Bearer {TOKEN.upper()}", False),
        ("Bearer é", False),
        ("Bearer", False),
        ("", False),
    ],
)
def test_only_the_token_is_let_in(given: str, admitted: bool) -> None:
    """All of it, with its scheme."""
    assert Security(token=TOKEN).admits(given.encode()) is admitted
    assert Security().admits(given.encode())


def test_whoever_is_given_no_security_has_the_environments_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a client in a user's script works, and no process that has a token forgets it."""
    monkeypatch.setenv("PENSTOCK_TOKEN", TOKEN)
    assert Security.from_environment() == Security(token=TOKEN, nats_token=TOKEN, control_token=TOKEN)
    monkeypatch.setenv("PENSTOCK_NATS_TOKEN", "nats")
    assert Security.from_environment().control_token == "nats"
    monkeypatch.setenv("PENSTOCK_CONTROL_TOKEN", "control")
    assert Security.from_environment() == Security(token=TOKEN, nats_token="nats", control_token="control")


def test_a_token_is_in_no_recipe_and_shows_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no key for it, a dump does not have it, and its owner's repr hides it."""
    monkeypatch.setenv("PENSTOCK_TOKEN", TOKEN)
    with pytest.raises(ConfigError, match=r"unknown key security\.token"):
        configuration.load(Recipe, (), [f"--security.token={TOKEN}"])
    recipe = configuration.load(Recipe, ())
    assert TOKEN not in configuration.dump(recipe)
    assert TOKEN not in repr(Security.load(recipe.security))


@pytest.mark.parametrize(
    ("setting", "remedy"),
    [
        (f"--bus.url=nats://{TOKEN}@localhost:4222", "set PENSTOCK_NATS_TOKEN"),
        (f"--reward.remote.url=https://user:{TOKEN}@host/judge", "set PENSTOCK_REMOTE_TOKEN"),
        (f"--reward.remote.url=https://{TOKEN}@host:99999", "set PENSTOCK_REMOTE_TOKEN"),
        (f"--reward.remote.url=user:{TOKEN}@host", "set PENSTOCK_REMOTE_TOKEN"),
    ],
)
def test_a_url_with_a_secret_is_refused_without_showing_it(setting: str, remedy: str) -> None:
    """It would be written into the run's folder."""
    with pytest.raises(ConfigError, match=remedy) as caught:
        configuration.load(Recipe, (), [setting])
    assert TOKEN not in str(caught.value)


def test_an_at_sign_behind_the_host_is_no_secret() -> None:
    """It may be part of a path or of a query."""
    for url in ("http://host/@judge", "http://host?by=a@b"):
        assert configuration.load(Recipe, (), [f"--reward.remote.url={url}"]).reward.remote.url == url


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tls_cert": "a"}, "tls_cert is given and tls_key is not"),
        ({"tls_key": "a"}, "tls_key is given and tls_cert is not"),
        ({"mutual": "true"}, "mutual = true needs tls_cert, tls_key and tls_ca"),
        ({"mutual": "true", "tls_ca": "a"}, "mutual = true needs"),
        ({"tls_server_name": "a"}, "tls_server_name = 'a' needs tls_ca"),
    ],
)
def test_half_a_section_is_an_error(settings: dict[str, str], said: str) -> None:
    """Each setting has those that it needs."""
    with pytest.raises(ConfigError, match=f"security: {said}"):
        configuration.load(Recipe, (), [f"--security.{key}={value}" for key, value in settings.items()])


def test_a_file_that_is_no_certificate_is_an_error_that_names_its_field(tmp_path: Path) -> None:
    """A missing one, and one with something else in it."""
    nothing, text = tmp_path / "nothing.pem", tmp_path / "text.pem"
    text.write_text("no certificate")
    with pytest.raises(ConfigError, match=r"security\.tls_ca = .*nothing\.pem.* cannot be read: No such file"):
        Security.load(SecurityConfig(tls_ca=nothing))
    with pytest.raises(ConfigError, match=r"security\.tls_ca = .*text\.pem.* holds no certificate"):
        Security.load(SecurityConfig(tls_ca=text))
    with pytest.raises(ConfigError, match=r"security\.tls_key = .*nothing\.pem.* cannot be read"):
        Security.load(SecurityConfig(tls_cert=text, tls_key=nothing))
    with pytest.raises(ConfigError, match=r"security\.tls_cert = .* and security\.tls_key = .* belong together"):
        Security.load(SecurityConfig(tls_cert=text, tls_key=text))
