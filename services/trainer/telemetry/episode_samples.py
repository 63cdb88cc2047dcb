"""Sample episodes for people to read: a group with its images, texts and verdicts, as files in the run folder."""

import json
from pathlib import Path

from penstock.records import Group, TextPart, to_builtins

_SUFFIX_OF_MAGIC = {b"\x89PNG": ".png", b"\xff\xd8\xff": ".jpg", b"GIF8": ".gif", b"RIFF": ".webp"}


def write_group(group: Group, folder: Path) -> None:
    """Write `group.json` and the prompt's images into `folder`, which is created."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, image in enumerate(group.prompt.images):
        suffix = next((s for magic, s in _SUFFIX_OF_MAGIC.items() if image.startswith(magic)), ".bin")
        (folder / f"image-{number}{suffix}").write_bytes(image)
    description = {
        "group": group.prompt.group_id,
        "messages": [
            {
                "role": message.role,
                "content": "".join(
                    part.text if isinstance(part, TextPart) else f"<image-{part.index}>" for part in message.parts
                ),
            }
            for message in group.prompt.messages
        ],
        "golds": group.prompt.golds,
        "samples": [
            {
                "text": sample.text,
                "verdict": to_builtins(sample.verdict),
                "finish_reason": sample.finish_reason,
                "num_tokens": int(sample.loss_mask.sum()),
                "versions": sorted({span.policy_version for span in sample.version_spans}),
            }
            for sample in group.samples
        ],
    }
    (folder / "group.json").write_text(json.dumps(description, indent=2, ensure_ascii=False) + "\n")
