"""docs/operation/security.md says what is so: people's programs run its commands as they stand, at a whole process."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import config as configuration
from penstock.config import SecurityConfig
from services.recipe import Recipe
from tests.support.certificates import PAGE, security_of
from tests.support.reward.process import RewardProcess, reward_process
from tests.support.strangers import TOKEN

PENSTOCK = Path(sys.executable).parent / "penstock"
LINE = '{"id": 1, "gold": "5", "response": "so \\\\boxed{5}"}\n'


@pytest.fixture(scope="module")
def folder(certificates: SecurityConfig) -> Path:
    """Where certs/ is."""
    assert certificates.tls_ca is not None
    return certificates.tls_ca.parent.parent


@pytest.fixture(scope="module")
def service(certificates: SecurityConfig) -> Iterator[RewardProcess]:
    """A reward service with a token and with TLS."""
    settings = [f"--security.{key}={value}" for key, value in certificates.model_dump(exclude={"mutual"}).items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_TOKEN", TOKEN)
        with reward_process("--reward.workers=1", *settings) as started:
            yield started


def block(language: str) -> str:
    """The one block of that language."""
    (code,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return str(code)


def run(command: list[str | Path], folder: Path, token: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_TOKEN", token)
        return subprocess.run(
            command, cwd=folder, input=stdin, capture_output=True, text=True, timeout=200, check=False
        )


def test_the_section_is_one_that_a_process_takes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the files that the commands have made, where they have made them."""
    (folder / "recipe.toml").write_text(block("toml"))
    monkeypatch.chdir(folder)
    tls = security_of(configuration.load(Recipe, [Path("recipe.toml")]).security).tls
    assert tls is not None
    assert tls.mutual
    tls.require_certificate()


def test_a_program_is_let_in_with_the_environments_token(service: RewardProcess, folder: Path) -> None:
    """And without it hears what is missing."""
    code = block("python").replace("localhost:7002", f"localhost:{service.address.rpartition(':')[2]}")
    code = f"import asyncio\nasync def main():\n{re.sub('^', '    ', code, flags=re.MULTILINE)}\n"
    code += "    print(len(await client.list_profiles()) > 5)\nasyncio.run(main())\n"
    assert run([sys.executable, "-c", code], folder, TOKEN).stdout == "True\n"
    refused = run([sys.executable, "-c", code], folder, "")
    assert "AccessError: reward at localhost" in refused.stderr
    assert "set PENSTOCK_TOKEN" in refused.stderr


@pytest.mark.slow
def test_score_is_let_in_with_the_environments_token(service: RewardProcess, folder: Path) -> None:
    """Without it: one line that says so, and exit code 2."""
    command = [PENSTOCK, "score", "--address", service.address, "--security.tls_ca=certs/ca.pem"]
    done = run(command, folder, TOKEN, LINE)
    assert json.loads(done.stdout)["score"] == 1.0, done.stderr
    refused = run(command, folder, "", LINE)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == f"error: reward at {service.address}: token missing or wrong; set PENSTOCK_TOKEN\n"


@pytest.mark.skipif(shutil.which("curl") is None, reason="the example is made with curl")
def test_curl(service: RewardProcess, folder: Path) -> None:
    """The page's command, at an https address."""
    (command,) = re.findall(r"^    (curl .*)$", PAGE, re.MULTILINE)
    command = command.replace("curl", "curl -s --cacert certs/ca.pem").replace("http://127.0.0.1:7003", service.url)
    assert "# HELP" in run(["sh", "-c", command], folder, TOKEN).stdout
    assert json.loads(run(["sh", "-c", command], folder, "").stdout)["error"]["code"] == "UNAUTHENTICATED"


@pytest.mark.slow
def test_a_wrong_setting_ends_the_process_at_its_start(folder: Path) -> None:
    """Before it listens anywhere; the token that was wrong is not shown."""
    command = [PENSTOCK, "serve", "reward", "--reward.workers=1"]
    done = run([*command, "--security.tls_ca=certs/none.pem"], folder, TOKEN)
    assert done.returncode == 2
    assert done.stderr.startswith("error: security.tls_ca = 'certs/none.pem' cannot be read")
    done = run(command, folder, "two words")
    assert done.returncode == 2
    assert done.stderr.startswith("error: PENSTOCK_TOKEN has characters")
    assert "two words" not in done.stderr
