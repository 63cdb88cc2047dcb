"""Turns demonstrations into sequences for the model.

Legend: T = tokens of a sample with one placeholder per image, X = the same with placeholders expanded.

Invariant: what is learned are the tokens of the assistant's that `Renderer.render_conversation` names; placeholders of
images and everything else are read only.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from penstock.model.chat_template import Renderer
from penstock.model.tokens import image_token_id
from services.trainer.batching.images import ImagePatcher, ImagePatches
from services.trainer.batching.sequences import TrainSequence, find_placeholders
from services.trainer.data.rows.example import Example


class DemonstrationReader:
    """Renders and expands demonstrations. Slow for large images, so call it from a thread, one at a time."""

    def __init__(
        self, renderer: Renderer, *, image_id: int | None, patcher: Callable[[bytes], ImagePatches] | None
    ) -> None:
        """Use a model's renderer, placeholder and image patcher; the last two are None for a text-only model."""
        self._renderer = renderer
        self._image_id = image_id
        self._patcher = patcher

    @classmethod
    def open(cls, model_path: Path) -> "DemonstrationReader":
        """Return a reader for the model in `model_path`, without reading its weights.

        Raises:
            ConfigError: the folder has no tokenizer or chat template, or an image model lacks its image processor.
        """
        image_id = image_token_id(model_path)
        patcher = None if image_id is None else ImagePatcher(model_path)
        return cls(Renderer.load(model_path), image_id=image_id, patcher=patcher)

    def read(self, example: Example) -> TrainSequence:
        """Return a demonstration expanded.

        Raises:
            InvalidRequestError: the chat template or the image processor refuses it, or the model takes no images.
        """
        ids, is_learned = self._renderer.render_conversation(
            example.messages,
            num_images=len(example.images),
            tools=example.tools,
            template_kwargs=example.chat_template_kwargs,
        )
        images = tuple(self._patcher(data) for data in example.images) if self._patcher is not None else ()
        ids_T, learned_T = np.array(ids, dtype=np.int64), np.array(is_learned)
        is_image_T, repeats_T = find_placeholders(ids_T, images, image_id=self._image_id)
        num_tokens = int(repeats_T.sum())
        return TrainSequence(
            token_ids_X=np.repeat(ids_T, repeats_T),
            loss_mask_X=np.repeat(learned_T, repeats_T),
            engine_logprobs_X=np.zeros(num_tokens, dtype=np.float32),
            versions_X=np.full(num_tokens, -1, dtype=np.int64),
            image_mask_X=np.repeat(is_image_T, repeats_T),
            images=images,
        )
