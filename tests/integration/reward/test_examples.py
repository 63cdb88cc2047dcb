"""The one-file shims for other trainers, as those call them, against a real service."""

import importlib.util
import logging
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.reward.process import reward_process

EXAMPLES = Path(__file__).parents[3] / "examples" / "other_trainers"
NAMES = ("verl_reward", "trl_reward", "areal_reward")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """URL of a service."""
    with reward_process("--reward.workers=1") as service:
        yield service.url


@pytest.fixture
def here(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment that examples/other_trainers/README.md asks for."""
    monkeypatch.setenv("PENSTOCK_REWARD_URL", url + "/")
    monkeypatch.setenv("PENSTOCK_REWARD_RETRY_S", "5")


def load(name: str) -> ModuleType:
    """The file, loaded by its path as trainers load it."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ask(name: str, gold: object, response: str) -> object:
    """One reward, asked for as the trainer asks."""
    module = load(name)
    match name:
        case "verl_reward":
            return module.compute_score(
                data_source="geo3k", solution_str=response, ground_truth=gold, extra_info={"index": 3}
            )
        case "trl_reward":
            (reward,) = module.penstock_reward(
                prompts=["2+3?"], completions=[response], completion_ids=[[1]], answer=[gold], trainer_state=None
            )
            return reward
        case _:
            return module.penstock_reward("2+3?", response, [1], [2], answer=gold, query_id="7")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", NAMES)
def test_right_and_wrong(name: str) -> None:
    """One gold answer, a number, several; a lone surrogate from a broken tokenizer on the way."""
    assert ask(name, "5", r"It is \boxed{5}") == 1.0
    assert ask(name, 5, "\ud800 " + r"\boxed{5}") == 1.0
    assert ask(name, ["4", "5"], r"\boxed{5}") == 1.0
    assert ask(name, "5", r"\boxed{6}") == 0.0
    assert ask(name, "5", "no answer") == 0.0


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", NAMES)
def test_a_bad_gold_answer_is_told(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is the data's fault; TRL leaves such a sample out."""
    with caplog.at_level(logging.WARNING):
        assert ask(name, "", r"\boxed{5}") == (None if name == "trl_reward" else 0.0)
    assert "GOLD_INVALID" in caplog.text


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", NAMES)
def test_the_profile_is_a_variable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that there is not is an error with the names of those that there are."""
    monkeypatch.setenv("PENSTOCK_REWARD_PROFILE", "geo3k")
    assert ask(name, "8.5", r"\boxed{8.46}") == 1.0
    monkeypatch.setenv("PENSTOCK_REWARD_PROFILE", "mth")
    with pytest.raises(RuntimeError, match=r"refused the request with 422: .*'mth' is unknown; known: "):
        ask(name, "5", r"\boxed{5}")


@pytest.mark.parametrize("name", NAMES)
def test_nobody_there_is_an_error_and_no_zero(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After it tried again for as long as it was told; without a URL at once."""
    monkeypatch.setenv("PENSTOCK_REWARD_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("PENSTOCK_REWARD_RETRY_S", "0.5")
    with pytest.raises(RuntimeError, match=r"no reward from the service at http://127.0.0.1:9, .*refused"):
        ask(name, "5", r"\boxed{5}")
    monkeypatch.delenv("PENSTOCK_REWARD_URL")
    with pytest.raises(RuntimeError, match="PENSTOCK_REWARD_URL is not set"):
        ask(name, "5", r"\boxed{5}")


@pytest.mark.parametrize("name", NAMES)
def test_a_service_that_is_away_or_full_is_asked_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that breaks, a full queue, and then a verdict; each time with the token, if there is one."""
    replies = [None, 429, 503, 200]
    tokens: list[str | None] = []
    monkeypatch.setenv("PENSTOCK_TOKEN", "of-the-service")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            tokens.append(self.headers["Authorization"])
            status = replies.pop(0)
            if status is None:
                return  # the connection closes without an answer
            body = b'{"verdicts": [{"score": 1.0, "status": "OK"}]}' if status == 200 else b"later"
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            monkeypatch.setenv("PENSTOCK_REWARD_URL", f"http://127.0.0.1:{server.server_port}")
            assert ask(name, "5", r"\boxed{5}") == 1.0
        finally:
            server.shutdown()
            thread.join()
    assert replies == []
    assert tokens == ["Bearer of-the-service"] * 4


@pytest.mark.usefixtures("here")
def test_trl_judges_chats_and_columns_named_solution() -> None:
    """The last message counts; content may come in parts; a batch is one request."""
    penstock_reward = load("trl_reward").penstock_reward
    right, wrong = r"\boxed{\frac{1}{3}}", r"\boxed{\frac{1}{2}}"
    completions = [
        [{"role": "assistant", "content": right}],
        [{"role": "assistant", "content": wrong}],
        [{"role": "assistant", "content": [{"type": "text", "text": right}]}],
        [
            {"role": "assistant", "content": wrong},
            {"role": "tool", "content": "3"},
            {"role": "assistant", "content": right},
        ],
    ]
    prompts = [[{"role": "user", "content": "?"}]] * 4
    rewards = penstock_reward(prompts=prompts, completions=completions, solution=[r"\frac{1}{3}"] * 4)
    assert rewards == [1.0, 0.0, 1.0, 1.0]
    with pytest.raises(RuntimeError, match="neither a column 'answer' nor a column 'solution'"):
        penstock_reward(prompts=prompts, completions=completions)


@pytest.mark.parametrize("name", NAMES)
def test_the_files_need_the_standard_library_only(name: str) -> None:
    """So that they can be copied into any trainer's environment."""
    lines = (EXAMPLES / f"{name}.py").read_text().splitlines()
    imported = {line.split()[1].partition(".")[0] for line in lines if line.startswith(("import ", "from "))}
    assert imported <= sys.stdlib_module_names
