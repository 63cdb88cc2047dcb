"""Keeps groups of an evaluation, with the pictures that environments showed."""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from penstock.bus.image_store import ImageStore
from penstock.errors import MissingImageError, UnavailableError
from penstock.model.tokens import image_token_id
from penstock.records import Group
from services.trainer.evaluation.evaluation import OnGroup
from services.trainer.evaluation.sets import EvaluationSet
from services.trainer.position import Position
from services.trainer.telemetry.episodes.config import EpisodesConfig
from services.trainer.telemetry.episodes.files import INDEX
from services.trainer.telemetry.episodes.log import FOLDER, EpisodeLog, EvaluatedRow, source_of
from services.trainer.telemetry.episodes.token_names import token_names
from services.trainer.telemetry.metrics_log import keep_lines


@asynccontextmanager
async def log_of_evaluation(
    folder: Path,
    config: EpisodesConfig,
    model_path: Path,
    *,
    version: int,
    played: Collection[tuple[str, int]] = (),
) -> AsyncIterator[EpisodeLog | None]:
    """Yield what keeps groups of an evaluation that belongs to no run; None if none are kept.

    Groups that an earlier start kept of rows that are played again are removed from the index.

    Args:
        folder: The evaluation's run folder.
        config: What is kept.
        model_path: The model that plays.
        version: The policy version that its engines report.
        played: Rows, by set and number, that are not played again.
    """
    await asyncio.to_thread(_keep_rows, folder, played)
    if config.keep == "off":
        yield None
        return
    episodes = await asyncio.to_thread(
        EpisodeLog,
        folder,
        config,
        Position(num_steps=0, step=0, version=version),
        dataset=None,
        names=token_names(model_path),
        image_token_id=image_token_id(model_path),
    )
    try:
        yield episodes
    finally:
        await asyncio.to_thread(episodes.close)


def _keep_rows(folder: Path, rows: Collection[tuple[str, int]]) -> None:
    kept = {(source_of(set_name), row) for set_name, row in rows}
    keep_lines(folder / FOLDER / INDEX, lambda entry: (entry.get("source"), entry.get("row")) in kept)


def keeping(
    episodes: EpisodeLog, sets: Mapping[str, EvaluationSet], images: ImageStore, *, step: int, version: int
) -> OnGroup:
    """Return what keeps groups of an evaluation in `episodes`.

    Args:
        episodes: Keeps the groups.
        sets: The sets that are played.
        images: Has the images of groups until their rows have outcomes.
        step: Steps taken to reach the weights that are evaluated.
        version: Their version.
    """

    async def keep(set_name: str, number: int, group: Group) -> None:
        each = sets[set_name]
        row = EvaluatedRow(set_name=set_name, row=number, num_rows=len(each), read=each.__getitem__)
        reason = episodes.why_keep_evaluated(step, row, group, pass_score=each.config.pass_score)
        if reason is not None:
            episodes.keep_evaluated(reason, step, version, row, group, await _fetch(images, group))

    return keep


async def _fetch(images: ImageStore, group: Group) -> dict[str, bytes]:
    """Return the images of a group's samples that can be fetched now; the evaluation waits for none."""
    found: dict[str, bytes] = {}
    with suppress(UnavailableError):
        for sha256 in sorted(group.images):
            with suppress(MissingImageError):
                found[sha256] = await images.get(group.id.scope, sha256)
    return found
