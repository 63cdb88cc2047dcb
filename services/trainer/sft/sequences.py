"""Turns demonstrations into sequences for the model.

Legend: T = tokens of a sample with one placeholder per image, X = the same with placeholders expanded.

Invariant: what is learned are the tokens of the assistant's that `Renderer.render_conversation` names; placeholders of
images and everything else are read only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.model.chat.chat_template import Renderer
from penstock.model.tokens import image_token_id
from services.trainer.batching.images import ImagePatcher, ImagePatches
from services.trainer.batching.sequences import TrainSequence, find_placeholders
from services.trainer.data.rows.example import Example


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RenderedDemonstration:
    """A demonstration as tokens, before its images are cut into patches."""

    token_ids_T: np.ndarray
    """int64[T]."""
    is_learned_T: np.ndarray
    """bool[T]."""
    images: tuple[bytes, ...]
    """Encoded, in the order of their placeholders."""


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
        """Return a demonstration rendered and expanded.

        Raises:
            InvalidRequestError: the chat template or the image processor refuses it, or the model takes no images.
        """
        return self.expand(self.render(example))

    def render(self, example: Example) -> RenderedDemonstration:
        """Return a demonstration's tokens, and which of them are learned.

        Raises:
            InvalidRequestError: the chat template refuses it.
        """
        ids, is_learned = self._renderer.render_conversation(
            example.messages,
            num_images=len(example.images),
            tools=example.tools,
            template_kwargs=example.chat_template_kwargs,
        )
        return RenderedDemonstration(
            token_ids_T=np.array(ids, dtype=np.int64), is_learned_T=np.array(is_learned), images=tuple(example.images)
        )

    def expand(self, rendered: RenderedDemonstration) -> TrainSequence:
        """Return a demonstration with its images.

        Raises:
            InvalidRequestError: the image processor refuses one, or the model takes no images.
        """
        images = tuple(self._patcher(data) for data in rendered.images) if self._patcher is not None else ()
        ids_T, learned_T = rendered.token_ids_T, rendered.is_learned_T
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
