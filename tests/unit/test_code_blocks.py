"""Every code block of the documents is what its language says, its commands and settings exist, and `make test-docs`
runs it or says why not."""

from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.docs.pages import PAGES
from tests.docs.reader import Reader, missing_lines
from tests.docs.steps import Given, NotRun, Page, Run, Step, Stop
from tests.support.documents.blocks import blocks_of, problems_of

_DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "bench").rglob("README.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
    )
)
_READ = [
    name
    for name in _DOCUMENTS
    if name.startswith(("docs/tutorials/", "docs/training/", "docs/rollouts/", "docs/reward/", "docs/operation/"))
    or name in ("README.md", "CONTRIBUTING.md", "docs/first-hour.md")
    or name.startswith("examples/")
]
"""The pages whose commands people type."""


@pytest.mark.parametrize("document", _DOCUMENTS)
def test_the_code_blocks_of_a_document_hold(document: str) -> None:
    """TOML is a recipe's, Python compiles and imports what exists, commands and their options and settings exist."""
    found = [(block.line, problems_of(block)) for block in blocks_of((ROOT / document).read_text())]
    assert [f"line {line}: {problem}" for line, problems in found for problem in problems] == []


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ("```python\ndef f(:\n```", "no Python"),
        ("```python\nimport no_such_package\n```", "there is no package no_such_package"),
        ("```python\nfrom penstock.environments import Nothing\n```", "there is no penstock.environments.Nothing"),
        ("```toml\n[trainer]\nmax_stalenes = 1\n```", "trainer.max_stalenes"),
        ("```toml\n[data\n```", "no recipe"),
        ("```json\n{1}\n```", "no JSON"),
        ("```yaml\na: [\n```", "no YAML"),
        ("```mermaid\nflowchat LR\n```", "no diagram of a known kind: flowchat"),
        ("```mermaid\nflowchart LR\n    call --> queue\n```", "call is a word of Mermaid's"),
        ("```\nanything\n```", "language ''"),
        ("```sh\npenstock trian tiny-cpu\n```", "there is no command `penstock trian`"),
        ("```sh\npenstock bus shaw 3\n```", "there is no command `penstock bus shaw`"),
        ("```sh\npenstock status RUN --jsn\n```", "`penstock status`: No such option: --jsn"),
        ("    penstock train tiny-cpu --trainer.max_stalenes=1", "trainer.max_stalenes"),
        ("    penstock train tiny-cpu --trainer.num_steps=many", "trainer.num_steps"),
        ("    penstock serve reward --reward.prt=7002", "reward.prt"),
        ("    torchrun --nproc-per-node 8 -m services.cli srve trainer", "there is no command `penstock srve`"),
        ("    torchrun --nproc-per-node 8 train.py", "torchrun starts neither"),
        ("    cd deploy && make upp", "there is no target upp"),
        ("    penstock train recipes/tiny.toml", "there is no recipes/tiny.toml"),
        ("    python bench/bench_push.py --gigabytes 2", "bench/bench_push.py has no option --gigabytes"),
        ("    python -m tools.profile_tables", "there is no tools/profile_tables.py"),
        ("    pip install '.[al]'", "there is no extra al"),
        ("    pip install 'penstock[reward]'", "penstock on PyPI is another project"),
        ("    pytest tests/unit/test_nothing.py", "there is no tests/unit/test_nothing.py"),
        ("    [trainer]\n    max_stalenes = 1", "trainer.max_stalenes"),
        (
            "    PYTHONPATH=examples/agent penstock train tiny-cpu --worker.agents.a.function=retry_agent:plays",
            "there is no retry_agent:plays in examples/agent",
        ),
    ],
)
def test_what_is_wrong_is_found(block: str, problem: str) -> None:
    """Each check can fail."""
    (found,) = blocks_of(block)
    assert [each for each in problems_of(found) if problem in each]


def test_a_block_may_say_why_it_is_not_checked() -> None:
    """Only the block behind the comment."""
    first, second = blocks_of("<!-- unchecked: a pattern -->\n\n```json\n{1}\n```\n\n```json\n{1}\n```\n")
    assert (first.reason, second.reason) == ("a pattern", "")
    assert problems_of(first) == []
    assert problems_of(second)


@pytest.mark.parametrize("document", _READ)
def test_each_block_is_run_or_listed_with_the_reason(document: str) -> None:
    """A new block, and one that is listed and gone, ask for a line in tests/docs/pages."""
    pages = {page.name: page for page in PAGES}
    assert pages.get(document, Page(document)).open_questions() == []


def test_every_page_that_is_run_is_read() -> None:
    """None is listed twice, or under a name that no page has."""
    names = [page.name for page in PAGES]
    assert sorted(set(names) - set(_READ)) == []
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("page", "question"),
    [
        (Page("page.md", Run("penstock doctor")), "line 5 is neither run nor listed"),
        (
            Page("page.md", Run("penstock doctor"), NotRun("penstock view", "")),
            "there is no block 'penstock view' here",
        ),
        (Page("page.md", Run("penstock doctor"), instead={"tiny-gpu": "x"}), "no command has 'tiny-gpu'"),
        (
            Page("page.md", Run("penstock doctor"), stays={"penstock view": ""}),
            "no command begins with 'penstock view'",
        ),
        (Page("page.md", Run("penstock doctor", {"make": "x"})), "no command begins with 'make'"),
        (Page("page.md", NotRun("penstock", "tests/gone.py runs it")), "there is no tests/gone.py"),
    ],
)
def test_an_open_question_is_found(page: Page, question: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each check can fail; a recipe needs no line."""
    monkeypatch.setattr("tests.docs.steps.ROOT", tmp_path)
    text = (
        "    penstock doctor tiny-cpu     # a comment\n\nand\n\n    penstock train tiny-cpu\n\n```toml\n[data]\n```\n"
    )
    (tmp_path / "page.md").write_text(text)
    assert question in page.open_questions()


@pytest.mark.parametrize(
    ("shown", "printed", "missing"),
    [
        ("step 1/8  reward 0.4\n...\nstep 8/8  reward 1e-3", "up\nstep 1/20 reward 0.33\nstep 3/20  reward 7.2", []),
        ("push 0.1 s  about 2 min left", "push 0.32 s about 59 s left", []),
        ("b\na", "a\nb", ["a"]),
        ("reward 1", "loss 1", ["reward 1"]),
        ("--- user\nI say", "--- user", []),
    ],
)
def test_what_a_page_shows_is_compared_without_numbers(shown: str, printed: str, missing: list[str]) -> None:
    """Line by line, in order; what the reader types is not printed."""
    assert missing_lines(shown, printed, but=("I ",)) == missing


@pytest.mark.parametrize(
    ("printed", "missing"),
    [
        ("17 failed, 102 passed in 3.1s", []),
        ("18 failed, 101 passed in 0.88s", ["17 failed, 102 passed in 0.88s"]),
        ("17 failed, 101 passed in 0.88s", ["17 failed, 102 passed in 0.88s"]),
    ],
)
def test_a_page_may_ask_for_its_numbers(printed: str, missing: list[str]) -> None:
    """Those that a pattern names; the other numbers of the line may differ."""
    assert missing_lines("17 failed, 102 passed in 0.88s", printed, exactly=r"\d+ (?:failed|passed)") == missing


def test_a_page_may_ask_for_a_sign() -> None:
    """A reward that has fallen is none that has risen."""
    shown, sign = "last 10 steps 0.009 (-0.328)", r"\([-+]"
    assert missing_lines(shown, "last 10 steps 0.012 (-0.315)", exactly=sign) == []
    assert missing_lines(shown, "last 10 steps 0.440 (+0.028)", exactly=sign) == [shown]


_STAYS = "echo $$ > pid; echo up; exec sleep 600"
_ENDS = "kill -9 $(cat pid); until grep -q ') Z' /proc/$(cat pid)/stat; do sleep 0.01; done"


@pytest.mark.parametrize("steps", [(), (Stop(), Given("true"))])
def test_a_command_that_should_stay_has_not_ended(
    steps: tuple[Step, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither at a stop nor at the end of the page."""
    monkeypatch.setattr("tests.docs.steps.ROOT", tmp_path)
    (tmp_path / "page.md").write_text("Nothing to type.\n")
    (checkout := tmp_path / "checkout").mkdir()
    stays = {"echo ": "up"}
    Reader(Page("page.md", Given(_STAYS), *steps, stays=stays), checkout).read()
    with pytest.raises(AssertionError, match=r"page\.md: echo .* has ended with -9:\nup"):
        Reader(Page("page.md", Given(_STAYS), Given(_ENDS), *steps, stays=stays), checkout).read()
