"""Output of `penstock data`: the report and the page of examples."""

import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from penstock.errors import DataError, SetupError
from penstock.model.folder import require_model
from services.cli import service_settings
from services.recipe import Recipe
from services.trainer.data.contact_sheet import Entry, render_sheet
from services.trainer.data.dataset import open_lengths
from services.trainer.data.lengths import Lengths
from services.trainer.data.mixture import BLOCK, Mixture
from services.trainer.data.prompt_length import ConversationLimit, PromptLimit
from services.trainer.data.sources.files import require_files
from services.trainer.data.sources.opening import cache_folder, open_sources
from services.trainer.data.sources.source import DEMONSTRATIONS, PROMPTS, Source
from services.trainer.data.survey import Survey, choose_rows, survey


def look(recipe: Recipe, *, max_rows: int | None, sheet: Path | None, num_examples: int, is_sft: bool) -> int:
    """Read every source, print its contents, and write the page of examples; return the exit code.

    Args:
        recipe: Names the sources and the model.
        max_rows: The most rows of each source, from the start; None reads all.
        sheet: File for the page; None: no page.
        num_examples: Examples of each source on the page.
        is_sft: Read rows as supervised training does.

    Raises:
        UserError: the data or the model are missing, or the page cannot be written.
    """
    for config in recipe.data.by_name.values():
        require_files(config)
    recipe = service_settings.with_model(recipe, with_weights=False)
    model = None if recipe.model is None else recipe.model.path
    service_settings.require_template_variables(recipe, model, with_sets=False)
    limit = _limit(recipe, is_sft=is_sft)
    sources = open_sources(recipe.data, form=DEMONSTRATIONS if is_sft else PROMPTS)
    lengths = open_lengths(sources, cache_folder(recipe.data), limit)
    found = _survey(sources, lengths, limit, max_rows)
    shares = Mixture({name: recipe.data.weight(name) for name in sources}, seed=0).shares
    for (name, source), share in zip(sources.items(), shares, strict=True):
        lines = [*([f"share of prompts {share / BLOCK:.1%}"] if name else []), *_lines(source, found[name], limit)]
        sys.stdout.write("\n".join([source.name, *(f"  {line}" for line in lines), "", ""]))
    if sheet is not None:
        _write(sheet, render_sheet(f"Data of run {recipe.run.name}", list(_entries(sources, lengths, num_examples))))
        sys.stdout.write(f"examples in {sheet}\n")
    refuses = recipe.data.wrong_rows == "refuse"
    return 1 if refuses and any(each.num_wrong for each in found.values()) else 0


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


def _survey(
    sources: Mapping[str, Source], lengths: Mapping[str, Lengths], limit: PromptLimit | None, max_rows: int | None
) -> dict[str, Survey]:
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    found = {}
    with bar:
        for name, source in sources.items():
            num_rows = len(source) if max_rows is None else min(max_rows, len(source))
            task = bar.add_task(name or "rows", total=num_rows)
            found[name] = survey(source, lengths[name], limit, max_rows=max_rows, on_row=partial(bar.advance, task))
    return found


def _lines(source: Source, found: Survey, limit: PromptLimit | None) -> Iterator[str]:
    read = "" if found.num_read == found.num_rows else f", {found.num_read} of them read"
    yield f"rows       {found.num_rows}{read}, in {_counted(len(source.tables), 'file')}"
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
            f"longest {max(found.num_tokens)}; at most {limit.max_tokens}"
        )
    if found.num_learned:
        learned = sorted(found.num_learned)
        yield f"learned    median {learned[len(learned) // 2]}, most {learned[-1]}, {sum(learned)} tokens in all"
    for word, counts in (("profile", found.profiles), ("environment", found.environments)):
        yield f"{word:<10} {', '.join(f'{name} {rows}' for name, rows in counts.most_common())}"
    yield f"dropped    {found.num_overlong} rows that are too long"
    if found.num_wrong:
        yield f"wrong      {_counted(found.num_wrong, 'row')}, refused or dropped as data.wrong_rows says:"
        yield from (f"           {reason}" for reason in found.reasons)


def _entries(sources: Mapping[str, Source], lengths: Mapping[str, Lengths], num_examples: int) -> Iterator[Entry]:
    for name, source in sources.items():
        for number in choose_rows(source, num_examples):
            try:
                example = source[number]
            except DataError:
                continue  # counted among the wrong rows above
            num_tokens = int(lengths[name].num_tokens[number])
            origin = f"{name}, row {number}" if name else f"row {number}"
            yield Entry(origin=origin, example=example, num_tokens=num_tokens if num_tokens > 0 else None)


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SetupError(f"--sheet {file} cannot be written: {error.strerror}; choose another file") from None


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
