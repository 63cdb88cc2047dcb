"""Logs of kept episodes, and groups for them."""

import json
from pathlib import Path
from typing import Any

from penstock.model.chat.chat_template import Renderer
from penstock.model.tokens import image_token_id
from penstock.records import Message, TextPart
from services.trainer.batching.sequences import TrainGroup
from services.trainer.data.rows.example import Example
from services.trainer.position import Position
from services.trainer.telemetry.episodes.config import EpisodesConfig
from services.trainer.telemetry.episodes.log import EpisodeLog, TrainedGroup
from tests.support.trainer.groups import IMAGES, make_group, num_placeholders, picture

MODEL = Path(__file__).parents[3] / "models" / "tiny-qwen3-vl"
PICTURE = picture(0)


class Rows:
    """A data set whose every row shows the same picture."""

    def row_at(self, position: int) -> tuple[str, int]:
        """The row of the same number."""
        return "", position

    def __getitem__(self, position: int) -> Example:
        """A problem."""
        return Example(
            messages=(Message(role="user", parts=(TextPart(text=f"problem {position}"),)),),
            images=(PICTURE,),
            golds=("3",),
            profile="math",
            environment="single_turn",
        )


def group(index: int, **changes: Any) -> TrainedGroup:
    """A group of four samples with a picture; the last is not trained."""
    played = make_group(
        MODEL, index=index, images=[PICTURE], placeholders=[num_placeholders((96, 96))], **{"version": 3, **changes}
    )
    samples: Any = tuple(() for _ in played.samples[:3])
    ready = TrainGroup(
        index=index, attempt=0, oldest_version=3, samples=samples, rewards=(1.0, 0.0, 0.0), numbers=(0, 1, 2)
    )
    return TrainedGroup(played=played, ready=ready, images={sha: IMAGES[sha] for sha in played.images})


def open_log(folder: Path, *, step: int = 0, is_resumed: bool = True, **config: Any) -> EpisodeLog:
    """A log of a run at a step."""
    position = Position(num_steps=10, step=step, version=step + 1)
    rows: Any = Rows()
    names = Renderer.load(MODEL).token_texts().names_of
    return EpisodeLog(
        folder,
        EpisodesConfig(**config),
        position,
        dataset=rows,
        names=names,
        image_token_id=image_token_id(MODEL),
        is_resumed=is_resumed,
    )


def index_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of the index."""
    return [json.loads(line) for line in (folder / "episodes" / "index.jsonl").read_text().splitlines()]


def whole(folder: Path, entry: dict[str, Any]) -> dict[str, Any]:
    """What the index refers to."""
    data = (folder / "episodes" / entry["file"]).read_bytes()[entry["offset"] :][: entry["size"]]
    found: dict[str, Any] = json.loads(data)
    return found
