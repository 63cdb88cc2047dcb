"""Custom verifiers: the user's own functions, in worker processes of a real service."""

import importlib
import os
import sys
from pathlib import Path

import pytest

from penstock.errors import ConfigError, SetupError
from penstock.v1 import reward_pb2
from services.reward.config import RewardConfig
from services.reward.profiles.custom import find_verifiers
from services.reward.server import running
from tests.conftest import ROOT
from tests.support.reward.service import EASY, OK, TIMEOUT, item_of, reward_service
from tests.support.waiting import HANG_S

_FAILED = reward_pb2.VERDICT_STATUS_FAILED
_VERIFIERS = """
import asyncio, os, resource, time
from types import SimpleNamespace

def contains(golds, response, prompt):
    return any(gold in response for gold in golds)

def half(golds, response, prompt):
    return {"credit": 0.5, "extracted": f"{prompt}|{golds}|{os.getpid()}"}

def record(golds, response, prompt):
    return SimpleNamespace(credit=1, extracted="it")

def limit(golds, response, prompt):
    limit_s, _ = resource.getrlimit(resource.RLIMIT_CPU)
    return {"credit": 1, "extracted": str(limit_s - time.process_time())}

def misbehave(golds, response, prompt):
    if response == "raise":
        raise ValueError("no such thing")
    if response == "exit":
        raise SystemExit(3)
    if response == "cancel":
        raise asyncio.CancelledError
    if response == "hang":
        time.sleep(60)
    return {"nan": float("nan"), "two": 2, "none": None, "text": "1", "bad": {"credit": 1, "extracted": 5}}[response]
"""


@pytest.fixture
def verifiers(tmp_path: Path) -> dict[str, str]:
    """Settings of five verifiers in a file."""
    path = tmp_path / "mine.py"
    path.write_text(_VERIFIERS)
    return {name: f"{path}:{name}" for name in ("contains", "half", "record", "limit", "misbehave")}


def _item(profile: str, response: str, **fields: object) -> reward_pb2.VerifyItem:
    return reward_pb2.VerifyItem(golds=["a", "b"], response=response, profile=profile, **fields)


async def test_verifiers_judge_in_workers(verifiers: dict[str, str]) -> None:
    """They see gold answers, response and prompt; what they return is a bool, a number, a dict or an object."""
    before = set(sys.modules)
    async with reward_service(verifiers=verifiers) as (client, pool):
        right, wrong, half, record = await client.verify_batch(
            [_item("contains", "xax"), _item("contains", "c"), _item("half", "r", prompt="p"), _item("record", "r")],
            timeout_s=600.0,
        )
        pids = pool.worker_pids
    assert [verdict.status for verdict in (right, wrong, half, record)] == [OK] * 4
    assert [verdict.score for verdict in (right, wrong, half, record)] == [1.0, 0.0, 0.5, 1.0]
    assert {verdict.method for verdict in (right, wrong, half, record)} == {reward_pb2.VERDICT_METHOD_VERIFIER}
    prompt, golds, pid = half.extracted.split("|")
    assert (prompt, golds, record.extracted) == ("p", "['a', 'b']", "it")
    assert int(pid) in pids
    assert int(pid) != os.getpid()
    assert not [name for name in set(sys.modules) - before if name.startswith("penstock_verifier_")]


async def test_a_verifier_that_fails_is_a_status_with_a_logged_reason(
    verifiers: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Exceptions, exits and values that are no credit are FAILED; what hangs is TIMEOUT; the service goes on."""
    responses = ["raise", "exit", "cancel", "nan", "two", "none", "text", "bad", "hang"]
    async with reward_service(verifiers=verifiers, profiles={"misbehave": {"reward_min": -1}}) as (client, _):
        items = [_item("misbehave", response, deadline_s=0.5 if response == "hang" else 30.0) for response in responses]
        verdicts = await client.verify_batch(items, timeout_s=HANG_S)
        assert (await client.verify_batch([_item("contains", "a")], timeout_s=30.0))[0].score == 1.0
    assert [verdict.status for verdict in verdicts] == [_FAILED] * 8 + [TIMEOUT]
    assert {verdict.score for verdict in verdicts} == {-1.0}
    logged = capsys.readouterr().out
    assert "ValueError: no such thing" in logged
    assert "SystemExit: 3" in logged
    assert "CancelledError" in logged
    assert "it returned nan; return a number from 0 to 1" in logged
    assert "it returned extracted = 5; return text" in logged


async def test_a_verifier_may_compute_on_all_cores_until_its_deadline(
    verifiers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processor time of its threads adds up. One that computes for ever is stopped, whatever its server does."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    async with reward_service(verifiers=verifiers) as (client, _):
        [verdict] = await client.verify_batch([_item("limit", "", deadline_s=20.0)], timeout_s=600.0)
    assert 8 * 20 < float(verdict.extracted) < 9 * 20


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "{folder}/absent.py:verify",
            r"custom verifier mine = '.*absent.py:verify' cannot be loaded: FileNotFoundError",
        ),
        ("{folder}/broken.py:verify", r"custom verifier mine = .* cannot be loaded: RuntimeError: licence expired"),
        ("{folder}/other.py:verify", r"cannot be loaded: AttributeError: .*verify"),
        ("{folder}/other.py:few", r"cannot be loaded: TypeError: too many positional arguments"),
        ("{folder}/other.py:number", r"cannot be loaded: TypeError: number is a int, not a function"),
        ("{folder}/other.py", r"cannot be loaded: ValueError: it names no function; write path/to/file.py:function"),
        ("no_such_package.module:verify", r"cannot be loaded: ModuleNotFoundError"),
    ],
)
async def test_a_verifier_that_cannot_be_loaded_stops_the_start(tmp_path: Path, spec: str, message: str) -> None:
    """The error names the verifier, where it should be, and the cause."""
    (tmp_path / "broken.py").write_text("raise RuntimeError('licence expired')\n")
    (tmp_path / "other.py").write_text("number = 1\ndef few(golds, response): ...\n")
    config = RewardConfig.model_validate({"workers": 1, "verifiers": {"mine": spec.format(folder=tmp_path)}})
    with pytest.raises(SetupError, match=message):
        async with running(config):
            pass


async def test_what_a_verifier_loads_is_no_item_s_memory(tmp_path: Path) -> None:
    """As of one that imports torch: other profiles' wrong answers are wrong, and their worker goes on."""
    (tmp_path / "large.py").write_text(
        "import mmap\nloaded = mmap.mmap(-1, 400 * 2**20)\ndef verify(golds, response, prompt):\n    return 1.0\n"
    )
    gold, _ = EASY
    verifiers = {"large": f"{tmp_path / 'large.py'}:verify"}
    async with reward_service(verifiers=verifiers, max_overtime=0) as (client, pool):
        before = pool.worker_pids
        verdicts = await client.verify_batch(
            [item_of(gold, r"\boxed{(2+x)^{-1}}"), _item("large", "")], timeout_s=600.0
        )
        after = pool.worker_pids
    assert [(verdict.status, verdict.score) for verdict in verdicts] == [(OK, 0.0), (OK, 1.0)]
    assert after == before


async def test_a_verifier_cannot_take_a_built_in_name() -> None:
    """Nobody verifies by another `math` than they think."""
    config = RewardConfig.model_validate({"verifiers": {"math": "package.module:verify"}})
    with pytest.raises(ConfigError, match="has the name of a built-in profile"):
        async with running(config):
            pass


async def test_installed_packages_offer_verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point is a profile; one of the same name in the settings is taken instead."""
    (tmp_path / "offered.py").write_text("def verify(golds, response, prompt):\n    return True\n")
    info = tmp_path / "offered-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offered\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[penstock.verifiers]\noffered = offered:verify\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    importlib.invalidate_caches()
    assert find_verifiers({}) == {"offered": "offered:verify"}
    assert find_verifiers({"offered": "mine.py:verify"}) == {"offered": "mine.py:verify"}
    async with reward_service() as (client, _):
        assert (await client.verify_batch([_item("offered", "")], timeout_s=600.0))[0].score == 1.0
    assert "offered" not in sys.modules


async def test_the_example_s_reward_falls_with_the_distance() -> None:
    """In a real service: 1 for the right number, 4/5 for one beside it, 0 from five on, and 0 without a number."""
    near = f"{ROOT / 'examples' / 'reward' / 'near.py'}:verify"
    responses = {r"\boxed{7}": 1.0, r"\boxed{6}": 0.8, r"It is 3, so \boxed{ 9.5 }": 0.5, r"\boxed{12}": 0.0, "7": 0.0}
    items = [reward_pb2.VerifyItem(golds=["7"], response=each, profile="near") for each in responses]
    async with reward_service(verifiers={"near": near}) as (client, _):
        verdicts = await client.verify_batch(items, timeout_s=600.0)
    assert [verdict.status for verdict in verdicts] == [OK] * len(items)
    assert [verdict.score for verdict in verdicts] == pytest.approx(list(responses.values()))
    assert [verdict.extracted for verdict in verdicts] == ["7", "6", "9.5", "12", ""]
