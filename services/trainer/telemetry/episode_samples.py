"""Writes sample episodes for people to read: a group's images, texts and verdicts, as files in the run folder."""

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec

from penstock.records import Group, TextPart
from services.trainer.data.rows.example import Example

_SUFFIX_OF_MAGIC = {b"\x89PNG": ".png", b"\xff\xd8\xff": ".jpg", b"GIF8": ".gif", b"RIFF": ".webp"}


def write_group(group: Group, example: Example, images: Mapping[str, bytes], folder: Path) -> None:
    """Write `group.json` and the images into `folder`, which is created.

    Args:
        group: The group as it was played.
        example: The example that it was played from.
        images: Its images, by content hash; samples refer to them by file name.
        folder: Destination folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number, image in enumerate(example.images):
        (folder / f"image-{number}{_suffix(image)}").write_bytes(image)
    for sha256, image in images.items():
        if image not in example.images:
            (folder / f"{sha256[:16]}{_suffix(image)}").write_bytes(image)
    description = {
        "group": group.id.group,
        "messages": [
            {
                "role": message.role,
                "content": "".join(
                    part.text if isinstance(part, TextPart) else f"<image-{part.index}>" for part in message.parts
                ),
                **(
                    {"tool_calls": [msgspec.to_builtins(call) for call in message.tool_calls]}
                    if message.tool_calls
                    else {}
                ),
            }
            for message in example.messages
        ],
        "golds": example.golds,
        "samples": [
            {
                "text": sample.text,
                "reward": sample.reward,
                "verdict": msgspec.to_builtins(sample.verdict),
                "finish_reason": sample.finish_reason,
                "error": sample.error,
                "num_tokens": sample.num_own_tokens,
                "versions": [sample.oldest_version, sample.newest_version],
                "turns": msgspec.to_builtins(sample.turns),
                "images": [sha256[:16] for sequence in sample.sequences for sha256 in sequence.images],
            }
            for sample in group.samples
        ],
    }
    (folder / "group.json").write_text(json.dumps(description, indent=2, ensure_ascii=False) + "\n")


def _suffix(image: bytes) -> str:
    return next((suffix for magic, suffix in _SUFFIX_OF_MAGIC.items() if image.startswith(magic)), ".bin")
