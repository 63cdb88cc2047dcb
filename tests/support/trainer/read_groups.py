"""Groups as the trainer reads them, for the tiny model."""

from collections.abc import Collection, Sequence
from pathlib import Path

from penstock.model.tokens import image_token_id, vocab_size
from services.trainer.batching.images import ImagePatcher
from services.trainer.batching.sequences import GroupReader, ModelTokens, TrainGroup
from tests.support.trainer.groups import IMAGES, make_group, picture


def reader_of(model_path: Path, *, forbidden_ids: Collection[int] = ()) -> GroupReader:
    """What reads groups that this model has sampled."""
    tokens = ModelTokens(
        vocab_size=vocab_size(model_path),
        image_id=image_token_id(model_path),
        forbidden_ids=frozenset(forbidden_ids),
    )
    return GroupReader(tokens, ImagePatcher(model_path))


def groups_with_pictures(
    model_path: Path, *, rewards: Sequence[Sequence[float]], versions: Sequence[int]
) -> list[TrainGroup]:
    """A group with a picture for each entry: its samples' rewards, and the version that sampled them."""
    reader = reader_of(model_path)
    return [
        reader.read(
            make_group(
                model_path, index=index, rewards=given, version=version, images=[picture(index)], placeholders=[9]
            ),
            IMAGES,
        )
        for index, (given, version) in enumerate(zip(rewards, versions, strict=True))
    ]
