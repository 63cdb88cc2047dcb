"""Is this request one that SGLang survives? What would kill or hang it is refused here, before it is submitted.

An id outside the vocabulary kills SGLang's processes, an image run that is already expanded hangs it for ever.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from penstock.errors import InvalidRequestError, PromptTooLongError
from penstock.model import tokens
from penstock.model.folder import read_json
from penstock.model.images import decode_image
from penstock.v1 import generate_pb2
from services.rollout.engine.disaggregation import check_bootstrap

_MAX_ASPECT_RATIO = 200
"""Of Qwen's image processor."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A request that was found to be sound."""

    input_ids: list[int]
    images: list[Image.Image]
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    """Cut to what the context leaves."""
    stop_token_ids: list[int]
    """The model's own and the request's."""
    bootstrap: generate_pb2.Bootstrap | None = None
    """The pair that it is half of."""


class PromptChecker:
    """Checks requests against one model."""

    def __init__(self, model_path: Path, *, max_tokens: int, disaggregated: bool = False) -> None:
        """`max_tokens`: the most tokens of prompt, images expanded, and response together. `disaggregated`: requests
        must be halves of pairs.
        """
        self.max_tokens = max_tokens
        self._disaggregated = disaggregated
        self._vocab_size = tokens.vocab_size(model_path)
        self._image_id = tokens.image_token_id(model_path)
        self._end_ids = tokens.end_token_ids(model_path)
        config = read_json(model_path / "config.json")
        self._video_id = config.get("video_token_id")
        self._vision_start_id = config.get("vision_start_token_id")
        self._grid = ImageGrid.of(model_path) if self._image_id is not None else None

    def check(self, request: generate_pb2.GenerateRequest) -> Turn:
        """Decode the images and check everything. Takes as long as the images take to decode.

        Raises:
            InvalidRequestError: naming the field, its value and the remedy.
            PromptTooLongError: the prompt leaves no room for a token.
        """
        sampling = request.sampling
        bootstrap = check_bootstrap(request, disaggregated=self._disaggregated)
        self._check_sampling(sampling)
        input_ids = list(request.input_ids)
        self._check_ids(input_ids, num_images=len(request.images))
        images = [decode_image(image.data, field=f"images[{index}]") for index, image in enumerate(request.images)]
        num_tokens = len(input_ids)
        for index, image in enumerate(images):
            assert self._grid is not None
            num_tokens += self._grid.num_tokens(image.width, image.height, field=f"images[{index}]") - 1
        if num_tokens >= self.max_tokens:
            raise PromptTooLongError(
                f"input_ids: the prompt has {num_tokens} tokens with its images expanded; prompt and response together "
                f"may have {self.max_tokens}; shorten it, or raise rollout.context_length or rollout.max_total_tokens"
            )
        return Turn(
            input_ids=input_ids,
            images=images,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_new_tokens=min(sampling.max_new_tokens, self.max_tokens - num_tokens),
            stop_token_ids=sorted({*self._end_ids, *sampling.stop_token_ids}),
            bootstrap=bootstrap,
        )

    def _check_sampling(self, sampling: generate_pb2.SamplingParams) -> None:
        if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
            raise InvalidRequestError(f"sampling.temperature = {sampling.temperature} must be 0 (greedy) or greater")
        if not 0 < sampling.top_p <= 1:
            raise InvalidRequestError(f"sampling.top_p = {sampling.top_p} must be in (0, 1]; 1 switches it off")
        if sampling.top_k < 0:
            raise InvalidRequestError(f"sampling.top_k = {sampling.top_k} must be 0 (off) or greater")
        if sampling.max_new_tokens < 1:
            raise InvalidRequestError(f"sampling.max_new_tokens = {sampling.max_new_tokens} must be at least 1")
        self._check_range(list(sampling.stop_token_ids), "sampling.stop_token_ids")

    def _check_range(self, ids: Sequence[int], field: str) -> None:
        if ids and not (min(ids) >= 0 and max(ids) < self._vocab_size):
            index = next(index for index, value in enumerate(ids) if not 0 <= value < self._vocab_size)
            raise InvalidRequestError(
                f"{field}[{index}] = {ids[index]} is outside the vocabulary of {self._vocab_size}; "
                "was it made with another model's tokenizer?"
            )

    def _check_ids(self, input_ids: list[int], *, num_images: int) -> None:
        if not input_ids:
            raise InvalidRequestError("input_ids is empty; give at least one token")
        self._check_range(input_ids, "input_ids")
        if num_images and self._image_id is None:
            raise InvalidRequestError(f"images: {num_images} were sent, but the model takes none")
        if self._image_id is not None and input_ids.count(self._image_id) != num_images:
            raise InvalidRequestError(
                f"input_ids holds {input_ids.count(self._image_id)} image placeholders (id {self._image_id}) for "
                f"{num_images} images; send exactly one per image, the engine expands it"
            )
        for index, token in enumerate(input_ids):
            # SGLang finds images, and their rotary positions, by what stands before them.
            if num_images and token == self._image_id and input_ids[max(0, index - 1)] != self._vision_start_id:
                raise InvalidRequestError(
                    f"input_ids[{index}] is an image placeholder (id {self._image_id}) that does not follow a vision "
                    f"start token (id {self._vision_start_id}); render prompts with the model's chat template"
                )
        if self._video_id in input_ids:
            raise InvalidRequestError(
                f"input_ids holds the video placeholder (id {self._video_id}); videos are not taken"
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ImageGrid:
    """How Qwen's image processor cuts an image into tokens."""

    factor: int
    """Pixels along the side of a token: patch size times merge size."""
    min_pixels: int
    max_pixels: int

    @classmethod
    def of(cls, model_path: Path) -> "ImageGrid":
        """Read from the model's preprocessor_config.json, or processor_config.json where there is none."""
        config = read_json(model_path / "preprocessor_config.json")
        config = config or read_json(model_path / "processor_config.json").get("image_processor", {})
        size = config.get("size", {})
        return cls(
            factor=config.get("patch_size", 14) * config.get("merge_size", 2),
            min_pixels=config.get("min_pixels") or size.get("shortest_edge") or 56 * 56,
            max_pixels=config.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280,
        )

    def num_tokens(self, width: int, height: int, *, field: str) -> int:
        """Tokens of an image (`smart_resize` of transformers' Qwen2-VL image processor).

        Raises:
            InvalidRequestError: one side is more than 200 times the other.
        """
        if max(width, height) > _MAX_ASPECT_RATIO * min(width, height):
            raise InvalidRequestError(
                f"{field} is {width} x {height} pixels; one side may be at most {_MAX_ASPECT_RATIO} times the other"
            )
        rows = round(height / self.factor)
        columns = round(width / self.factor)
        if rows * columns * self.factor**2 > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows = max(1, math.floor(height / shrink / self.factor))
            columns = max(1, math.floor(width / shrink / self.factor))
        elif rows * columns * self.factor**2 < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows = math.ceil(height * grow / self.factor)
            columns = math.ceil(width * grow / self.factor)
        return rows * columns
