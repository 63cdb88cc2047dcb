"""Checks requests before SGLang sees them, and refuses those that would kill or hang it.

An id outside the vocabulary kills SGLang's processes; image placeholders that are already expanded hang it.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from penstock.errors import InvalidRequestError, PromptTooLongError
from penstock.model import tokens
from penstock.model.families.qwen_vl import ImageGrid
from penstock.model.folder import read_json
from penstock.model.images import decode_image, read_sizes
from penstock.v1 import generate_pb2
from services.rollout.engine.disaggregation import check_bootstrap

MAX_TOP_LOGPROBS = 20
"""Maximum number of likely ids reported per token, as at OpenAI. Each costs scheduler time and stream bytes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRequest:
    """A request that passed every check."""

    input_ids: list[int]
    images: list[Image.Image]
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    """Limited to the rest of the context."""
    stop_token_ids: list[int]
    """The stop tokens of the model and of the request."""
    ignore_end: bool = False
    """Ignore stop tokens: generate up to the length limit."""
    constraint: dict[str, str] = dataclasses.field(default_factory=dict)
    """SGLang's sampling parameter for the required form of the output; empty if there is none."""
    num_top_logprobs: int = 0
    prompt_logprobs: bool = False
    routed_experts_from: int | None = None
    """Index of the first token whose experts are reported; None: none are."""
    bootstrap: generate_pb2.Bootstrap | None = None
    """How the peers of the PD pair find each other; None on a unified engine."""


class PromptChecker:
    """Checks requests against one model."""

    def __init__(
        self, model_path: Path, *, max_tokens: int, disaggregated: bool = False, records_experts: bool = False
    ) -> None:
        """Check against the model at `model_path`.

        Args:
            model_path: The model's folder.
            max_tokens: Maximum tokens of prompt (images expanded) and response together.
            disaggregated: Each request must name a PD pair.
            records_experts: Whether the engine records which experts compute each token.
        """
        self.max_tokens = max_tokens
        self._disaggregated = disaggregated
        self._records_experts = records_experts
        self._vocab_size = tokens.vocab_size(model_path)
        self._image_id = tokens.image_token_id(model_path)
        self._end_ids = tokens.end_token_ids(model_path)
        config = read_json(model_path / "config.json")
        self._video_id = config.get("video_token_id")
        self._vision_start_id = config.get("vision_start_token_id")
        self._grid = ImageGrid.of(model_path) if self._image_id is not None else None

    def check(self, request: generate_pb2.GenerateRequest, files: Sequence[bytes]) -> CheckedRequest:
        """Check all fields, then decode the images, which takes most of the time.

        Args:
            request: The request.
            files: The encoded files of its images, in their order.

        Raises:
            InvalidRequestError: names the field, its value and the remedy.
            PromptTooLongError: the prompt leaves no room for a token.
        """
        sampling = request.sampling
        bootstrap = check_bootstrap(request, disaggregated=self._disaggregated)
        self._check_sampling(sampling)
        self._check_report(request, num_images=len(files))
        input_ids = list(request.input_ids)
        self._check_ids(input_ids, num_images=len(files))
        num_tokens = len(input_ids)
        if self._grid is not None:
            num_tokens += self._grid.num_added_tokens(read_sizes(files))
        if num_tokens >= self.max_tokens:
            raise PromptTooLongError(
                f"input_ids: the prompt has {num_tokens} tokens with its images expanded; prompt and response together "
                f"may have {self.max_tokens}; shorten it, or raise rollout.context_length or rollout.max_total_tokens"
            )
        routed_experts_from = self._check_experts(request, num_tokens)
        return CheckedRequest(
            input_ids=input_ids,
            # Last, because decoding costs the most memory and time.
            images=[decode_image(data, field=f"images[{index}]") for index, data in enumerate(files)],
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_new_tokens=min(sampling.max_new_tokens, self.max_tokens - num_tokens),
            stop_token_ids=[] if sampling.ignore_end else sorted({*self._end_ids, *sampling.stop_token_ids}),
            ignore_end=sampling.ignore_end,
            constraint=_sglang_constraint(sampling.constraint),
            num_top_logprobs=request.num_top_logprobs,
            prompt_logprobs=request.prompt_logprobs,
            routed_experts_from=routed_experts_from,
            bootstrap=bootstrap,
        )

    def _check_sampling(self, sampling: generate_pb2.SamplingParams) -> None:
        if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
            raise InvalidRequestError(f"sampling.temperature = {sampling.temperature} must be 0 (greedy) or greater")
        if not 0 < sampling.top_p <= 1:
            raise InvalidRequestError(f"sampling.top_p = {sampling.top_p} must be in (0, 1]; 1 turns it off")
        if sampling.top_k < 0:
            raise InvalidRequestError(f"sampling.top_k = {sampling.top_k} must be 0 (off) or greater")
        if sampling.max_new_tokens < 1:
            raise InvalidRequestError(f"sampling.max_new_tokens = {sampling.max_new_tokens} must be at least 1")
        self._check_range(list(sampling.stop_token_ids), "sampling.stop_token_ids")
        if sampling.ignore_end and sampling.stop_token_ids:
            raise InvalidRequestError("sampling.stop_token_ids and sampling.ignore_end are both set; leave one out")

    def _check_report(self, request: generate_pb2.GenerateRequest, *, num_images: int) -> None:
        """Check what the request asks to have reported beside its output."""
        if not 0 <= request.num_top_logprobs <= MAX_TOP_LOGPROBS:
            raise InvalidRequestError(
                f"num_top_logprobs = {request.num_top_logprobs} must be from 0 to {MAX_TOP_LOGPROBS}"
            )
        if request.prompt_logprobs and (num_images or self._disaggregated):
            reason = f"there are {num_images} images" if num_images else "this engine is a peer of a PD pair"
            raise InvalidRequestError(f"prompt_logprobs is set, but {reason}; leave it out")

    def _check_experts(self, request: generate_pb2.GenerateRequest, num_tokens: int) -> int | None:
        """Return the first token whose experts are reported; `num_tokens` counts those of the prompt."""
        if not request.HasField("routed_experts_from"):
            return None
        first = request.routed_experts_from
        if not self._records_experts:
            raise InvalidRequestError(
                f"routed_experts_from = {first}, but this engine records no experts; leave it out, or start the engine "
                "with trainer.router_replay = true, a mixture of experts and role unified"
            )
        if not 0 <= first <= num_tokens:
            raise InvalidRequestError(
                f"routed_experts_from = {first} must be from 0 to the prompt's {num_tokens} tokens"
            )
        return first

    def _check_range(self, ids: Sequence[int], field: str) -> None:
        if ids and not (min(ids) >= 0 and max(ids) < self._vocab_size):
            index = next(index for index, value in enumerate(ids) if not 0 <= value < self._vocab_size)
            raise InvalidRequestError(
                f"{field}[{index}] = {ids[index]} is outside the vocabulary of {self._vocab_size}; "
                "was it encoded with another model's tokenizer?"
            )

    def _check_ids(self, input_ids: list[int], *, num_images: int) -> None:
        if not input_ids:
            raise InvalidRequestError("input_ids is empty; give at least one token")
        self._check_range(input_ids, "input_ids")
        if num_images and self._image_id is None:
            raise InvalidRequestError(f"images: {num_images} images were sent, but the model takes none")
        if self._image_id is not None and input_ids.count(self._image_id) != num_images:
            raise InvalidRequestError(
                f"input_ids holds {input_ids.count(self._image_id)} image placeholders (id {self._image_id}) for "
                f"{num_images} images; send exactly one per image, the engine expands it"
            )
        for index, token in enumerate(input_ids):
            # SGLang finds images and their rotary positions by the token before the placeholder.
            if num_images and token == self._image_id and input_ids[max(0, index - 1)] != self._vision_start_id:
                raise InvalidRequestError(
                    f"input_ids[{index}] is an image placeholder (id {self._image_id}) that does not follow a vision "
                    f"start token (id {self._vision_start_id}); render prompts with the model's chat template"
                )
        if self._video_id in input_ids:
            raise InvalidRequestError(
                f"input_ids holds the video placeholder (id {self._video_id}); videos are not supported"
            )


def _sglang_constraint(constraint: generate_pb2.Constraint) -> dict[str, str]:
    """Return the constraint under SGLang's name, which is the same as ours.

    Raises:
        InvalidRequestError: its schema is not a JSON object, or it is empty.
    """
    form = constraint.WhichOneof("form")
    if form is None:
        return {}
    if form == "json_schema":
        try:
            is_schema = isinstance(json.loads(constraint.json_schema), dict)
        except (ValueError, RecursionError):
            is_schema = False
        if not is_schema:
            raise InvalidRequestError(
                f"sampling.constraint.json_schema = {constraint.json_schema[:80]!r} is not a JSON object"
            )
    text = getattr(constraint, form)
    if not text:  # SGLang would take it for none
        raise InvalidRequestError(f"sampling.constraint.{form} is empty; give one, or leave the constraint out")
    return {form: text}
