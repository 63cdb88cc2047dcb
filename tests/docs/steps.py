"""What is done with each code block of a page, and which blocks a page leaves open.

Blocks in TOML, JSON, YAML and Mermaid need no step: tests/unit/test_code_blocks.py loads them.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tests.conftest import ROOT
from tests.support.documents.blocks import Block, blocks_of, is_loaded

NOTHING = "(?!)"
"""A pattern that nothing matches."""
_TEST_FILE = re.compile(r"tests/[\w/]+\.py")


@dataclass(frozen=True, slots=True)
class Run:
    """Each command of the block, or the Python program that it is, ends with 0."""

    start: str
    """How the block begins."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Why a command is not run, by a pattern of how it begins."""


@dataclass(frozen=True, slots=True)
class Save:
    """The reader saves the block as a file."""

    start: str
    name: str


@dataclass(frozen=True, slots=True)
class Shows:
    """Each line of the block, apart from its numbers, is among what the last commands printed, in the block's order."""

    start: str
    but: tuple[str, ...] = ()
    """How lines begin that are not compared: the reader types them, or they differ from run to run."""
    exactly: str = NOTHING
    """A pattern without groups of what is compared with its numbers."""


@dataclass(frozen=True, slots=True)
class NotRun:
    """The block is left alone."""

    start: str
    reason: str


@dataclass(frozen=True, slots=True)
class Given:
    """A command that is no block: the page says it in a sentence, or takes what it makes for granted."""

    command: str


@dataclass(frozen=True, slots=True)
class Stop:
    """The reader ends what still runs."""


Step = Run | Save | Shows | NotRun | Given | Stop


class Page:
    """A page, and a step for each of its blocks, in order."""

    def __init__(
        self, name: str, *steps: Step, instead: Mapping[str, str] | None = None, stays: Mapping[str, str] | None = None
    ) -> None:
        """Describe a page.

        Args:
            name: Its path in the checkout.
            steps: What is done, from top to bottom.
            instead: Texts of its commands, and what the test writes there: fewer steps, or a name for a placeholder.
            stays: Patterns of how commands begin that go on until the page ends or the reader stops them, and what
                each prints when it is ready.
        """
        self.name = name
        self.steps = steps
        self.instead = instead or {}
        self.stays = stays or {}

    def command(self, text: str) -> str:
        """The command as the test runs it."""
        for old, new in self.instead.items():
            text = text.replace(old, new)
        return text

    def paired(self) -> list[tuple[Step, Block | None]]:
        """Its steps with their blocks; what no step and no block fits is left out."""
        return [(step, block) for step, block in self._pairs() if step is not None]

    def open_questions(self) -> list[str]:
        """Blocks that are neither run nor listed, and what is listed and not on the page."""
        pairs = list(self._pairs())
        met = [step for step, _ in pairs if step is not None]
        texts = [block.text for step, block in pairs if isinstance(step, Run) and block is not None]
        texts += [step.command for step in met if isinstance(step, Given)]
        commands = [each for text in texts for each in commands_of(text)]
        found = [f"line {block.line} is neither run nor listed" for step, block in pairs if step is None and block]
        found += [f"there is no block {step.start!r} here" for step in self.steps if _not_among(step, met)]
        found += [f"no command has {old!r}" for old in self.instead if not any(old in each for each in commands)]
        commands = [self.command(each) for each in commands]
        beginnings = [*self.stays, *(start for step in met if isinstance(step, Run) for start in step.left_out)]
        found += [
            f"no command begins with {each!r}"
            for each in beginnings
            if not any(re.match(each, one) for one in commands)
        ]
        reasons = [reason for step in met if isinstance(step, Run) for reason in step.left_out.values()]
        reasons += [step.reason for step in met if isinstance(step, NotRun)]
        files = _TEST_FILE.findall("\n".join(reasons))
        return found + [f"there is no {file}" for file in files if not (ROOT / file).exists()]

    def _pairs(self) -> Iterator[tuple[Step | None, Block | None]]:
        """Each block with its step; a block without one, and a step without a block, stand alone."""
        steps = list(self.steps)
        for block in blocks_of((ROOT / self.name).read_text()):
            while steps and isinstance(steps[0], Given | Stop):
                yield steps.pop(0), None
            if steps and block.text.lstrip().startswith(steps[0].start):
                yield steps.pop(0), block
            elif not is_loaded(block):
                yield None, block
        while steps and isinstance(steps[0], Given | Stop):
            yield steps.pop(0), None


def commands_of(text: str) -> list[str]:
    """The commands of a block, without the comments behind them."""
    lines = text.replace("\\\n", " ").splitlines()
    return [command for line in lines if (command := re.sub(r"(?:^|\s+)# .*", "", line).strip())]


def _not_among(step: Step, met: list[Step]) -> bool:
    """By identity: a page may have two blocks that begin in the same way."""
    return isinstance(step, Run | Save | Shows | NotRun) and not any(step is each for each in met)
