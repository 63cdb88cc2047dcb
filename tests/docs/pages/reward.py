"""docs/reward."""

from tests.docs.pages.reasons import DOCKER, INSTALLS
from tests.docs.steps import Given, NotRun, Page, Run, Save

_TESTED = "tests/integration/reward/test_page.py runs it as it stands"

PAGES = (
    Page(
        "docs/reward/profiles.md",
        Given("mkdir verifiers"),
        Save("def verify", "verifiers/mine.py"),
        Save("[reward.verifiers]", "mine.toml"),
        Given(r"""echo '{"id": 1, "gold": "7", "response": "7\n"}' > answers.jsonl"""),
        Given("penstock score --config mine.toml --profile mine answers.jsonl | grep '\"score\": 1.0'"),
    ),
    Page(
        "docs/reward/service.md",
        Run("pip install", left_out={"pip": INSTALLS}),
        NotRun("docker build", DOCKER),
        Run("import asyncio"),
        NotRun("a 1.0 VERDICT", _TESTED),
        NotRun("curl", _TESTED),
        NotRun("penstock score", _TESTED),
        NotRun('{"id": "a"', _TESTED),
        NotRun('{"id": "a"', _TESTED),
        NotRun("def verify", _TESTED),
        NotRun("penstock serve reward", _TESTED),
        NotRun("curl", _TESTED),
        NotRun("curl", _TESTED),
        stays={"penstock serve reward": "server.started"},
    ),
)
