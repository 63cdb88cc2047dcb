"""Output of `penstock data`: the report and the page of examples."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from penstock.errors import DataError, PenstockError, SetupError, UnavailableError, UserError
from penstock.model.folder import require_model
from services.cli.output_file import output_file
from services.launch.checks.known_names import KnownNames, require_names
from services.launch.checks.row_check import RowsOfRun
from services.launch.checks.template_variables import require_template_variables
from services.launch.settings import hub_models
from services.recipe import Recipe
from services.trainer.data.config import DataConfig
from services.trainer.data.contact_sheet import Entry, render_sheet
from services.trainer.data.dataset import open_lengths
from services.trainer.data.lengths import Lengths
from services.trainer.data.mixture import BLOCK, Mixture
from services.trainer.data.named_section import named_section
from services.trainer.data.prompt_length import ConversationLimit, PromptLimit
from services.trainer.data.rows.example import Example
from services.trainer.data.sources.files import require_files
from services.trainer.data.sources.opening import cache_folder, open_sources
from services.trainer.data.sources.source import DEMONSTRATIONS, EVALUATED, PROMPTS, RowForm, Rows, Source
from services.trainer.data.survey import Survey, choose_rows, survey
from services.trainer.demonstrations.files import require_demonstrations
from services.trainer.evaluation.sets import open_sets


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Rows that the report describes together: those of a source, or those that an evaluation set plays."""

    section: str
    """Where the recipe has it."""
    title: str
    rows: Rows
    source: Source
    lengths: Lengths
    limit: PromptLimit | None = None
    """Decides which rows are too long; None: none is."""
    require: Callable[[Example], None] | None = None
    """Raises ValueError for a row that does not fit other settings."""
    share: str = ""
    """Its share of a mixture."""
    drops_wrong: bool = False


def look(recipe: Recipe, *, max_rows: int | None, sheet: Path | None, num_examples: int, is_sft: bool) -> int:
    """Read all rows, print their contents, and write the page of examples; return the exit code.

    Args:
        recipe: Names the sources, the evaluation sets and the model.
        max_rows: The most rows of each source and set, from the start; None reads all.
        sheet: File for the page; None: no page.
        num_examples: Examples of each of the prompts' sources on the page.
        is_sft: Read rows as supervised training does.

    Raises:
        UserError: the data or the model are missing, or the page cannot be written.
    """
    if sheet is not None:
        _require_writable(sheet)  # to read all rows may take hours
    recipe = _checked(recipe, is_sft=is_sft)
    limit = _limit(recipe, is_sft=is_sft)
    require = None if is_sft else KnownNames.of(recipe).require
    form = DEMONSTRATIONS if is_sft else PROMPTS
    prompts = list(_parts("data", recipe.data, limit, form=form, require=require))
    if not is_sft:
        most = recipe.sampling.max_new_tokens
        prompts = [replace(part, rows=RowsOfRun(part.source, max_new_tokens=most)) for part in prompts]
    sets, wrong_sets = _sets(recipe, require, is_sft=is_sft)
    parts = [*prompts, *([] if is_sft else _demonstrations(recipe)), *sets]
    found = _survey(parts, max_rows)
    for part, each in zip(parts, found, strict=True):
        sys.stdout.write("\n".join([part.title, *(f"  {line}" for line in _lines(part, each)), "", ""]))
    sys.stdout.write("".join(f"{error}\n\n" for error in wrong_sets))
    if sheet is not None:
        _write(sheet, render_sheet(f"Data of run {recipe.run.name}", list(_entries(prompts, num_examples))))
        sys.stdout.write(f"examples in {sheet}\n")
    is_refused = any(_is_refused(part, each) for part, each in zip(parts, found, strict=True))
    return 1 if wrong_sets or is_refused else 0


def _checked(recipe: Recipe, *, is_sft: bool) -> Recipe:
    """Check the settings, and return the recipe with the folder of its model, without weights."""
    for config in recipe.data.by_name.values():
        require_files(config)
    if recipe.demonstrations is not None and not is_sft:
        require_demonstrations(recipe.demonstrations)
    recipe = hub_models.with_model(recipe, with_weights=False)
    model = None if recipe.model is None else recipe.model.path
    require_template_variables(recipe, model, with_sets=False, with_demonstrations=not is_sft)
    if not is_sft:
        require_names(recipe, sets=True)
    return recipe


def _limit(recipe: Recipe, *, is_sft: bool) -> PromptLimit | None:
    if recipe.model is None:
        return None
    require_model(recipe.model.path)
    if is_sft:
        return ConversationLimit.of_model(recipe.model.path, max_tokens=recipe.sft.max_tokens)
    return PromptLimit.of_run(
        recipe.model.path,
        context=recipe.rollout.context_length,
        max_new_tokens=recipe.sampling.max_new_tokens,
        max_prompt_tokens=recipe.data.max_prompt_tokens,
        keep=recipe.filters.overlong_prompts == "keep",
    )


def _parts(
    section: str,
    config: DataConfig,
    limit: PromptLimit | None,
    *,
    form: RowForm,
    require: Callable[[Example], None] | None = None,
) -> Iterator[_Part]:
    """Yield the sources of a section."""
    sources = open_sources(config, form=form)
    lengths = open_lengths(sources, cache_folder(config), limit)
    shares = Mixture({name: config.weight(name) for name in sources}, seed=0).shares
    for (name, source), share in zip(sources.items(), shares, strict=True):
        yield _Part(
            section=f"{section}.sources.{name}" if name else section,
            title=source.name if section == "data" else f"{section}: {source.name}",
            rows=source,
            source=source,
            lengths=lengths[name],
            limit=limit,
            require=require,
            share=f"share of {'prompts' if section == 'data' else section} {share / BLOCK:.1%}" if name else "",
            drops_wrong=config.wrong_rows == "drop",
        )


def _demonstrations(recipe: Recipe) -> list[_Part]:
    config = recipe.demonstrations
    if config is None:
        return []
    with named_section("demonstrations"):
        limit = None
        if recipe.model is not None:
            limit = ConversationLimit.of_model(
                recipe.model.path, max_tokens=config.max_tokens, setting="demonstrations.max_tokens"
            )
        return list(_parts("demonstrations", config, limit, form=DEMONSTRATIONS))


def _sets(
    recipe: Recipe, require: Callable[[Example], None] | None, *, is_sft: bool
) -> tuple[list[_Part], list[PenstockError]]:
    """Return the evaluation sets with files, and why others cannot be opened: they may not matter to this run."""
    parts, errors = [], list[PenstockError]()
    is_used = not is_sft or recipe.sft.validate_every > 0
    for name, config in recipe.evaluation.sets.items() if is_used else ():
        if not config.paths:
            continue
        only = recipe.evaluation.model_copy(update={"sets": {name: config}})
        try:
            each = open_sets(only, recipe.data, form=DEMONSTRATIONS if is_sft else EVALUATED, reads_rows=False)[name]
        except (UserError, UnavailableError) as error:
            errors.append(error)
            continue
        section = f"evaluation.sets.{name}"
        parts.append(
            _Part(
                section=section,
                title=f"{section}: {each.source.name}",
                rows=each,
                source=each.source,
                lengths=Lengths(len(each)),
                require=require,
            )
        )
    return parts, errors


def _survey(parts: Sequence[_Part], max_rows: int | None) -> list[Survey]:
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    found = []
    with bar:
        for part in parts:
            num_rows = len(part.rows) if max_rows is None else min(max_rows, len(part.rows))
            task = bar.add_task(f"rows of {part.section}", total=num_rows)
            found.append(
                survey(
                    part.rows,
                    part.source,
                    part.lengths,
                    part.limit,
                    require=part.require,
                    max_rows=max_rows,
                    on_row=partial(bar.advance, task),
                )
            )
    return found


def _is_refused(part: _Part, found: Survey) -> bool:
    """Return whether training would refuse one of the rows, or all together."""
    return bool(found.num_unfit if part.drops_wrong else found.num_wrong) or bool(_refusal(part, found))


def _refusal(part: _Part, found: Survey) -> str:
    """Return why training would refuse all rows together; empty if it would not, or only some of them were read."""
    if found.num_read < found.num_rows:
        return ""
    if found.num_wrong == found.num_rows:
        return f"all {found.num_wrong} rows are wrong"
    if part.limit is None or found.num_overlong < found.num_rows:
        return ""
    return part.limit.refusal(num_rows=found.num_rows, shortest=min(found.num_tokens), budget=part.source.budget)


def _lines(part: _Part, found: Survey) -> Iterator[str]:
    source, limit = part.source, part.limit
    if part.share:
        yield part.share
    of_all = "" if found.num_rows == len(source) else f" of {len(source)}"
    read = "" if found.num_read == found.num_rows else f", {found.num_read} of them read"
    yield f"rows       {found.num_rows}{of_all}{read}, in {_counted(len(source.tables), 'file')}"
    columns = source.first_columns
    images = f", images {', '.join(columns.images)}" if columns.images else ""
    extra = f"; extra {', '.join(columns.extra)}" if columns.extra else ""
    answer = f", answer {columns.gold}" if columns.gold else ""
    yield f"columns    text {columns.text}{answer}{images}{extra}"
    if found.sizes:
        per_row = ", ".join(f"{number} in {rows} rows" for number, rows in sorted(found.images_per_row.items()))
        areas = sorted(found.sizes, key=lambda size: size[0] * size[1])
        small, middle, large = (f"{size[0]} x {size[1]}" for size in (areas[0], areas[len(areas) // 2], areas[-1]))
        yield f"images     {per_row}; {small} to {large} pixels, median {middle}"
    if found.num_images_put_first:
        yield f"           put before the text in {found.num_images_put_first} rows without <image>"
    if found.num_tokens and limit is not None:
        yield (
            f"tokens     median {found.percentile(0.5)}, 90% {found.percentile(0.9)}, 99% {found.percentile(0.99)}, "
            f"longest {max(found.num_tokens)}; at most {limit.room(source.budget)}"
        )
    if found.num_learned:
        learned = sorted(found.num_learned)
        yield f"learned    median {learned[len(learned) // 2]}, most {learned[-1]}, {sum(learned)} tokens in all"
    for word, counts in (("profile", found.profiles), ("environment", found.environments)):
        yield f"{word:<10} {', '.join(f'{name} {rows}' for name, rows in counts.most_common())}"
    if limit is not None:
        yield f"dropped    {found.num_overlong} rows that are too long"
        if limit.kept_tokens is not None:
            yield f"kept       {found.num_kept} rows that are too long, played with the room that is left, if any"
    if found.num_wrong:
        section = part.section.partition(".")[0]
        fate = "refused" if section == "evaluation" else f"refused or dropped as {section}.wrong_rows says"
        num_shown = len(found.reasons)
        first = "" if num_shown == found.num_wrong else f"; the first {num_shown} of {found.num_wrong}"
        yield f"wrong      {_counted(found.num_wrong, 'row')}, {fate}{first}:"
        yield from (f"           {reason}" for reason in found.reasons)
    if refusal := _refusal(part, found):
        yield f"refused    {refusal}"


def _entries(parts: Sequence[_Part], num_examples: int) -> Iterator[Entry]:
    for part in parts:
        for number in choose_rows(part.source, num_examples):
            try:
                example = part.rows[number]
            except DataError:
                continue  # counted among the wrong rows above
            num_tokens = int(part.lengths.num_tokens[number])
            name = part.section.removeprefix("data.sources.") if part.share else ""
            origin = f"{name}, row {number}" if name else f"row {number}"
            yield Entry(origin=origin, example=example, num_tokens=num_tokens if num_tokens > 0 else None)


def _require_writable(file: Path) -> None:
    if os.path.isdir(file):
        raise _unwritable(file, "it is a folder")
    if not os.path.isdir(file.parent):
        raise _unwritable(file, f"there is no folder {file.parent}, or it is closed to you")
    is_device = os.path.exists(file) and not os.path.isfile(file)
    if not os.access(file if is_device else file.resolve().parent, os.W_OK):  # a file is replaced
        raise _unwritable(file, "you have no permission")


def _write(file: Path, text: str) -> None:
    try:
        with output_file(file) as out:
            out.write(text.encode())
    except OSError as error:
        raise _unwritable(file, error.strerror) from None


def _unwritable(file: Path, reason: str | None) -> SetupError:
    return SetupError(f"--sheet {file} cannot be written: {reason}; choose another file")


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
