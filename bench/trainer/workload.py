"""The training data of all subjects of `bench_trainer.py`: a cut-down Qwen3-VL, and groups like those of Geometry3K.

The model has Qwen3-VL-2B's proportions: a feed-forward part of three times the hidden size, twice as many query as key
heads, deepstack at three of the tower's layers, a tied head, a tower of about 5% of a step's arithmetic. Its vocabulary
is so small that the head is below a fifth of it.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

IMAGE_SIDE = 640
"""Pixels: 20 x 20 placeholders of 32 x 32 pixels."""
TEXT = "Find x in the figure. " * 4
RESPONSES = ((100, 190, 280, 380, 490, 640, 900, 1500), (130, 220, 300, 360, 450, 560, 760, 1180))
"""Tokens of each response of each group: fixed, and as long-tailed as responses to Geometry3K are."""
REWARDS = (1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0)
ENGINE_LOGPROB = -8.0
"""Logprob of every token: about that of a random model."""
VOCABULARY, HIDDEN, LAYERS = 4096, 512, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The inputs of one optimizer step; plain data, so that a process without Penstock can read it."""

    text: str
    """Text of each prompt, after its image."""
    images: list[str]
    """PNG files, one per group."""
    responses: list[list[list[int]]]
    """Token ids, group by group."""
    rewards: list[float]
    """Rewards of the samples of a group, the same for every group."""

    @classmethod
    def read(cls, file: Path) -> "Workload":
        """Read a file of `write_workload`."""
        return cls(**json.loads(file.read_text()))


def write_model(folder: Path) -> None:
    """Write the model with random weights, its tokenizer and its processor."""
    import torch
    from transformers import Qwen3VLForConditionalGeneration
    from transformers.utils import logging

    from models import tiny_qwen3_vl as tiny

    logging.disable_progress_bar()
    tokenizer = tiny.build_tokenizer()
    config = tiny.build_config(tokenizer)
    text = {
        **{"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 3 * HIDDEN},
        **{"num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64},
        "rope_parameters": {**config.text_config.rope_parameters, "mrope_section": [12, 10, 10]},
    }
    vision = {
        **{"depth": 4, "hidden_size": 128, "intermediate_size": 512, "num_heads": 2, "out_hidden_size": HIDDEN},
        **{"num_position_embeddings": 2304, "deepstack_visual_indexes": [0, 1, 2]},
    }
    for part, shape in ((config.text_config, text), (config.vision_config, vision)):
        for name, value in shape.items():
            setattr(part, name, value)
    torch.manual_seed(0)
    processor = tiny.build_processor(tokenizer)
    for part in (processor.image_processor, processor.video_processor):
        part.size = {"shortest_edge": 32 * 32, "longest_edge": IMAGE_SIDE * IMAGE_SIDE}
    tiny.save_model(Qwen3VLForConditionalGeneration(config).float(), processor, folder)


def write_workload(folder: Path, *, num_groups: int = len(RESPONSES)) -> Path:
    """Write the step's inputs, and return the file that names them."""
    from PIL import Image

    rng = np.random.default_rng(0)
    images = []
    for number in range(num_groups):
        file = folder / f"image-{number}.png"
        pixels = rng.integers(0, 256, (20, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((IMAGE_SIDE, IMAGE_SIDE), Image.Resampling.NEAREST).save(file)
        images.append(str(file))
    responses = [[rng.integers(0, 256, length).tolist() for length in lengths] for lengths in RESPONSES[:num_groups]]
    workload = Workload(text=TEXT, images=images, responses=responses, rewards=list(REWARDS))
    file = folder / "workload.json"
    file.write_text(json.dumps(asdict(workload)))
    return file


def read_groups(model: Path, workload: Workload) -> list[Any]:
    """Return the step's groups as the trainer reads them from the bus."""
    from transformers import AutoProcessor

    from penstock.model.tokens import image_token_id
    from services.trainer.batching.images import ImagePatcher
    from services.trainer.batching.sequences import TrainGroup, TrainSequence

    processor, patcher, image_id = AutoProcessor.from_pretrained(model), ImagePatcher(model), image_token_id(model)
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": workload.text}]}
    prompt = processor.apply_chat_template([message], add_generation_prompt=True)
    collapsed = processor.tokenizer(prompt).input_ids
    groups = []
    for index, (image, responses) in enumerate(zip(workload.images, workload.responses, strict=True)):
        patches = patcher(Path(image).read_bytes())
        at = collapsed.index(image_id)
        expanded = [*collapsed[:at], *[image_id] * patches.num_placeholders, *collapsed[at + 1 :]]
        sequences = []
        for response in responses:
            own = np.array([False] * len(expanded) + [True] * len(response))
            ids = np.array([*expanded, *response])
            sequences.append(
                TrainSequence(
                    token_ids_X=ids,
                    loss_mask_X=own,
                    engine_logprobs_X=np.where(own, ENGINE_LOGPROB, 0).astype(np.float32),
                    versions_X=np.where(own, 1, -1),
                    image_mask_X=ids == image_id,
                    images=(patches,),
                )
            )
        groups.append(
            TrainGroup(
                index=index,
                attempt=0,
                oldest_version=1,
                samples=tuple((sequence,) for sequence in sequences),
                rewards=tuple(workload.rewards),
            )
        )
    return groups
