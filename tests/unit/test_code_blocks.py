"""Every code block of the documents is what its language says, and its commands and settings exist."""

import pytest

from tests.conftest import ROOT
from tests.support.documents.blocks import blocks_of, problems_of

_DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
    )
)


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
