"""Evaluation sets: rows in a fixed order, each with the prompt that a worker plays.

Invariant: row i of a set is the same in every evaluation, whatever was played before.
"""

import hashlib
from collections.abc import Callable
from typing import Final, NoReturn

import msgspec

from penstock.bus.image_store import hash_of
from penstock.errors import ConfigError, DataError
from penstock.records import GroupId, Prompt, Sampling, TextPart
from services.trainer.data.config import DataConfig
from services.trainer.data.rows.example import Example
from services.trainer.data.rows.messages import IMAGE_MARK
from services.trainer.data.sources.opening import built_in, open_sources
from services.trainer.data.sources.source import EVALUATED, RowForm, Source
from services.trainer.evaluation.config import EvaluationConfig, EvaluationSetConfig
from services.trainer.evaluation.outcome import PlayedPrompt, source_of
from services.trainer.evaluation.set_files import named_set

MAX_CHECKED_ROWS: Final = 5000
"""Rows of each set that are read before anything is played: about 1 ms per image."""
EVALUATION_SEED: Final = 1
"""Seed of the built-in problems of evaluation sets, different from training's. There are few different pictures, so
training has seen most of them, except held-out ones."""


class EvaluationSet:
    """The rows of one set that are played."""

    def __init__(self, name: str, config: EvaluationSetConfig, source: Source) -> None:
        """Take the first `num_prompts` rows of `source`, or all if it is 0.

        Raises:
            ConfigError: the source has fewer rows.
        """
        if config.num_prompts > len(source):
            raise ConfigError(
                f"evaluation.sets.{name}.num_prompts = {config.num_prompts}, but {source.name} has {len(source)} rows; "
                "lower it, or set 0 for all"
            )
        self.name = name
        self.config = config
        self.source = source

    def __len__(self) -> int:
        return self.config.num_prompts or len(self.source)

    def __getitem__(self, row: int, /) -> Example:
        """Read a row.

        Raises:
            DataError: the row is invalid, or wants more tokens than the set allows.
        """
        with named_set(self.name):
            example = self.source[row]
            wanted, most = example.max_new_tokens, self.config.max_new_tokens
            if wanted is not None and wanted > most:
                raise self.source.wrong(
                    row, ValueError(f"its max_new_tokens = {wanted} is above the set's, {most}; raise the setting")
                )
            return example

    def check(
        self, *, max_rows: int = MAX_CHECKED_ROWS, require: Callable[[Example], None] = lambda example: None
    ) -> None:
        """Read the first rows; of the built-in problems, one.

        Args:
            max_rows: The most rows to read.
            require: Raises ValueError for a row that does not fit other settings.

        Raises:
            DataError: one of them is invalid.
        """
        column = self.config.break_down_by
        for row in range(min(len(self), max_rows if self.source.config.paths else 1)):
            example = self[row]
            try:
                require(example)
            except ValueError as error:
                self.refuse(row, error)
            travelling = self.source.first_columns.extra
            if row == 0 and column and column.partition(".")[0] not in travelling:
                raise DataError(
                    f"evaluation.sets.{self.name}.break_down_by = {column!r} is no column that travels with the "
                    f"prompt; the first row has {', '.join(sorted(travelling)) or 'none'}"
                )

    def refuse(self, row: int, error: Exception) -> NoReturn:
        """Refuse a row that was read, but does not fit other settings or cannot be sent.

        Raises:
            DataError: always; the message names the set, the row's file and its place there.
        """
        with named_set(self.name):
            raise self.source.wrong(row, error) from None

    def sampling(self, example: Example) -> Sampling:
        """Return the sampling parameters for this row: its own, else the set's."""
        own = example.sampling
        return Sampling(
            temperature=float(own.get("temperature", self.config.temperature)),
            top_p=float(own.get("top_p", self.config.top_p)),
            top_k=max(0, int(own.get("top_k", self.config.top_k))),
            max_new_tokens=example.max_new_tokens or self.config.max_new_tokens,
        )

    def prompt(self, row: int, example: Example, group_id: GroupId, *, version: int, images: tuple[str, ...]) -> Prompt:
        """Return the prompt that a worker plays.

        Args:
            row: The row's number.
            example: The row.
            group_id: The prompt's identity.
            version: The only policy version that may play it.
            images: Content hashes of the row's images, stored under the prompt's identity.
        """
        return Prompt(
            id=group_id,
            admitted_version=version,
            exact_version=version,
            purpose=self.name,
            num_samples=self.config.samples_per_prompt,
            sampling=self.sampling(example),
            messages=example.messages,
            tools=example.tools,
            chat_template_kwargs=dict(example.chat_template_kwargs),
            images=images,
            golds=example.golds,
            profile=example.profile,
            environment=example.environment,
            limits=example.limits,
            extra=dict(example.extra),
            seed_key=f"{self.name}/{row}",
        )

    def described(self, row: int, example: Example) -> PlayedPrompt:
        """Return the row's record in samples.jsonl, without samples."""
        return PlayedPrompt(
            set_name=self.name,
            row=row,
            source=source_of(example.extra, self.config.break_down_by),
            messages=[
                {
                    "role": message.role,
                    "content": "".join(
                        part.text if isinstance(part, TextPart) else IMAGE_MARK for part in message.parts
                    ),
                    **(
                        {"tool_calls": [msgspec.to_builtins(call) for call in message.tool_calls]}
                        if message.tool_calls
                        else {}
                    ),
                }
                for message in example.messages
            ],
            golds=example.golds,
            samples=(),
            images=tuple(map(hash_of, example.images)),
            terms=_digest_of_terms(example),
        )


def _digest_of_terms(example: Example) -> str:
    terms = (
        example.profile,
        example.environment,
        example.tools,
        dict(example.chat_template_kwargs),
        example.max_new_tokens,
        dict(example.sampling),
        example.limits,
        dict(example.extra),
    )
    return hashlib.sha256(msgspec.json.encode(terms, order="deterministic")).hexdigest()[:16]


def open_sets(
    config: EvaluationConfig,
    data: DataConfig,
    *,
    form: RowForm = EVALUATED,
    reads_rows: bool = True,
    require: Callable[[Example], None] = lambda example: None,
) -> dict[str, EvaluationSet]:
    """Open every set and read its rows, so that nothing is started for a set that cannot be played.

    Args:
        config: The sets.
        data: Settings that they share with training: memory and cache.
        form: What rows are read as.
        reads_rows: Whether to read the first rows; otherwise only columns and the number of rows are checked.
        require: Raises ValueError for a row that does not fit other settings.

    Raises:
        ConfigError: a file does not exist, or has fewer rows than the set wants.
        DataError: a file, a column or a row is invalid, or there are no rows.
        UnavailableError: the Hugging Face Hub cannot be reached, and its cache has no copy.
    """
    opened = {}
    for name, each in config.sets.items():
        with named_set(name):
            if each.paths:
                source = open_sources(each.data(data), form=form)[""]
            else:
                source = built_in(each, seed=EVALUATION_SEED, pictures=each.pictures, form=form)
        opened[name] = EvaluationSet(name, each, source)
        if reads_rows:
            opened[name].check(require=require)
    return opened
