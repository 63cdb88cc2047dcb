"""What engines are measured against: the same tiny Qwen3-VL in transformers, and the prompts and pictures for both."""

import copy
import io
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw

from penstock.model.images import decode_image
from penstock.model.tokens import forbidden_token_ids, image_token_id
from penstock.testing.tolerance import MAX_DLOGP
from penstock.v1 import common_pb2, generate_pb2
from services.rollout.testing.engine_process import EngineProcess
from services.trainer.backend.policy.experts.mixture import routers_of
from tests.support.waiting import HANG_S, until

TOLERANCE = MAX_DLOGP
START_ID, END_ID, IMAGE_ID, VIDEO_ID = 363, 364, 366, 367
"""Vision tokens of the tiny model."""


class Reference:
    """The same model in transformers."""

    def __init__(self, model_path: Path) -> None:
        from transformers import AutoConfig, AutoImageProcessor, AutoModelForCausalLM, AutoModelForImageTextToText

        has_images = hasattr(AutoConfig.from_pretrained(model_path), "vision_config")
        auto_class = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
        self.model: Any = auto_class.from_pretrained(model_path, dtype=torch.float32).eval()
        self.processor: Any = AutoImageProcessor.from_pretrained(model_path)
        self.image_id = image_token_id(model_path)
        self.forbidden = list(forbidden_token_ids(model_path))

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """What a trainer pushes."""
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    def in_float64(self) -> "Reference":
        """The same weights without rounding to speak of: in pictures the float32 model's own errors reach 1e-5."""
        other = copy.copy(self)
        other.model = copy.deepcopy(self.model).double()
        other.model.set_experts_implementation("eager")  # grouped products know no float64
        return other

    def perturbed(self, seed: int) -> "Reference":
        """A policy that another optimizer step might have made, vision tower and all."""
        other = copy.copy(self)
        other.model = copy.deepcopy(self.model)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in other.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
        return other

    @torch.no_grad()
    def logprobs(
        self, input_ids: Sequence[int], images: Sequence[bytes], output_ids: Sequence[int], *, temperature: float
    ) -> tuple[torch.Tensor, int]:
        """Of each output id, and the length of the expanded prompt."""
        ids, inputs, prompt_length = self._inputs(input_ids, images, output_ids)
        logits = self.model(input_ids=ids, **inputs).logits[0, prompt_length - 1 : -1]
        return self._scores(logits, output_ids, temperature), prompt_length

    @torch.no_grad()
    def router_margin(self, input_ids: Sequence[int], images: Sequence[bytes], output_ids: Sequence[int]) -> float:
        """How near the nearest router of a mixture is to another choice: logit of its last expert less the next one's.

        Infinite without routers. Where it is less than rounding, an engine may choose the other expert.
        """
        nearest = [math.inf]

        def look(router: Any, args: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, ...]) -> None:
            num_chosen = output[2].shape[-1]
            logits = torch.nn.functional.linear(args[0].flatten(0, -2), router.weight).sort(descending=True).values
            nearest.append(float((logits[:, num_chosen - 1] - logits[:, num_chosen]).min()))

        hooks = [router.register_forward_hook(look) for router in routers_of(self.model)]
        ids, inputs, _ = self._inputs(input_ids, images, output_ids)
        self.model(input_ids=ids, **inputs)
        for hook in hooks:
            hook.remove()
        return min(nearest)

    @torch.no_grad()
    def highest_logprobs(
        self, input_ids: Sequence[int], images: Sequence[bytes], output_ids: Sequence[int]
    ) -> torch.Tensor:
        """Of the likeliest token in the place of each output id, at temperature 1."""
        ids, inputs, prompt_length = self._inputs(input_ids, images, output_ids)
        logits = self.model(input_ids=ids, **inputs).logits[0, prompt_length - 1 : -1].float()
        logits[:, self.forbidden] = -torch.inf
        return logits.log_softmax(dim=-1).max(dim=-1).values

    @torch.no_grad()
    def logprobs_over_change(
        self,
        newer: "Reference",
        input_ids: Sequence[int],
        images: Sequence[bytes],
        output_ids: Sequence[int],
        num_old: int,
    ) -> torch.Tensor:
        """Of each output id, when this policy makes the first `num_old` and `newer` goes on from its KV."""
        ids, inputs, prompt_length = self._inputs(input_ids, images, output_ids[: num_old - 1])
        old = self.model(input_ids=ids, use_cache=True, **inputs)
        newer.model.model.rope_deltas = self.model.model.rope_deltas
        rest = torch.tensor([list(output_ids[num_old - 1 : -1])], dtype=torch.long)
        logits = [old.logits[0, prompt_length - 1 :]]
        if rest.numel():
            positions = ids.shape[1] + torch.arange(rest.shape[1])
            if images:
                positions = positions + self.model.model.rope_deltas[0]
            new = newer.model(
                input_ids=rest, past_key_values=old.past_key_values, position_ids=positions.expand(3, 1, -1)
            )
            logits.append(new.logits[0])
        return self._scores(torch.cat(logits), output_ids, 1.0)

    def _inputs(
        self, input_ids: Sequence[int], images: Sequence[bytes], output_ids: Sequence[int]
    ) -> tuple[torch.Tensor, dict[str, Any], int]:
        """Ids with images expanded, what goes beside them, and the length of the prompt."""
        inputs: dict[str, Any] = {}
        counts: list[int] = []
        if images:
            inputs = dict(self.processor(images=[decode_image(image) for image in images], return_tensors="pt"))
            counts = (inputs["image_grid_thw"].prod(dim=1) // 4).tolist()
        expanded: list[int] = []
        remaining = iter(counts)
        for token in input_ids:
            expanded += [token] * (next(remaining) if token == self.image_id else 1)
        ids = torch.tensor([[*expanded, *output_ids]])
        if images:
            inputs["mm_token_type_ids"] = (ids == self.image_id).int()
        return ids, inputs, len(expanded)

    def _scores(self, logits: torch.Tensor, output_ids: Sequence[int], temperature: float) -> torch.Tensor:
        logits[:, self.forbidden] = -torch.inf
        scores = (logits / temperature).log_softmax(dim=-1)
        return scores[torch.arange(len(output_ids)), torch.tensor(output_ids)]


def request(
    input_ids: Sequence[int], images: Sequence[bytes] = (), *, max_new_tokens: int = 24, temperature: float = 1.0
) -> generate_pb2.GenerateRequest:
    """A turn."""
    return generate_pb2.GenerateRequest(
        request_id="test",
        input_ids=input_ids,
        images=[common_pb2.Image(data=image) for image in images],
        sampling=generate_pb2.SamplingParams(temperature=temperature, top_p=1.0, max_new_tokens=max_new_tokens),
    )


def require_logprobs(
    policies: Mapping[int, Reference], made: generate_pb2.GenerateRequest, response: generate_pb2.GenerateResponse
) -> None:
    """Each token has the logprob that the policy of its version gives it."""
    images = [image.data for image in made.images]
    temperature = made.sampling.temperature or 1.0
    assert sum(span.num_tokens for span in response.version_spans) == len(response.output_ids) > 0
    first = 0
    for span in response.version_spans:
        expected, _ = policies[span.policy_version].logprobs(
            made.input_ids, images, response.output_ids, temperature=temperature
        )
        end = first + span.num_tokens
        got = torch.tensor(list(response.logprobs)[first:end])
        assert (got - expected[first:end]).abs().max() < TOLERANCE
        first = end


def picture(width: int, height: int, *, mode: str = "RGB", format: str = "PNG", seed: int = 0) -> bytes:
    """A drawing in any size and mode."""
    draw_seed = random.Random(seed)
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    for _ in range(8):
        corners = [(draw_seed.randrange(width), draw_seed.randrange(height)) for _ in range(2)]
        draw.line(corners, fill=tuple(draw_seed.randrange(256) for _ in range(3)), width=3)
    if mode in ("RGBA", "LA"):
        image = image.convert(mode)
        image.putalpha(Image.linear_gradient("L").resize((width, height)))
    elif mode == "P-transparent":
        image = image.quantize(16)
        image.info["transparency"] = bytes(range(0, 256, 16))
    elif mode != "RGB":
        image = image.convert(mode)
    file = io.BytesIO()
    image.save(file, format)
    return file.getvalue()


def prompt(rng: random.Random, *, num_images: int, image_id: int | None, length: int = 20) -> list[int]:
    """Random text with placeholders in random places, each between its vision tokens."""
    places = sorted(rng.randrange(length) for _ in range(num_images))
    ids: list[int] = []
    for index in range(length):
        ids += [START_ID, image_id or 0, END_ID] * places.count(index)
        ids.append(rng.randrange(300))
    return ids


def long_request() -> generate_pb2.GenerateRequest:
    """One that runs for a second or more."""
    made = request([3, 4, 5], max_new_tokens=900)
    made.sampling.ignore_end = True
    return made


async def assert_freed(engine: EngineProcess) -> None:
    """Calls that had hundreds of tokens to go are gone while another makes a hundred: each step makes one for all."""
    made = request([3, 4, 5], max_new_tokens=100)
    made.sampling.ignore_end = True
    await engine.generation.Generate(made, timeout=HANG_S)
    replica = await engine.replica()
    assert replica.num_running + replica.num_queued <= 1, "more than the one that has just ended"
    await until_replica(engine, lambda replica: replica.num_running == replica.num_queued == 0)


async def until_replica(engine: EngineProcess, wanted: Any, timeout_s: float = HANG_S) -> common_pb2.Replica:
    """The replica as soon as it is as `wanted`."""
    replica = common_pb2.Replica()

    async def holds() -> bool:
        nonlocal replica
        replica = await engine.replica()
        return bool(wanted(replica))

    await until(holds, timeout_s)
    return replica
