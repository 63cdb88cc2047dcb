"""The reference for packed rows: samples padded to the longest one, through transformers' own code throughout.

Legend: B = samples of a micro-batch, T = its longest sample, N = the policy's own tokens in it (sample by sample), H =
hidden size, V = vocabulary.

Padding is on the right, where causal attention from a real token never looks. Positions, masks and attention are
transformers'; logits exist only at the policy's own tokens, all at a time.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from services.trainer.batching.sequences import TrainSequence


def plan_padded(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cut samples into micro-batches of at most `max_tokens`, padding included. Return their numbers.

    Longest first, so that samples of similar length share a micro-batch. A longer sample is alone.
    """
    plan: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        if plan and (len(plan[-1]) + 1) * lengths[plan[-1][0]] <= max_tokens:
            plan[-1].append(number)
        else:
            plan.append([number])
    return plan


class PaddedPolicy:
    """Log-probabilities from an unchanged transformers model."""

    def __init__(self, model: Any, *, temperature: float, forbidden_ids: Sequence[int]) -> None:
        """Use `model` as it is, in evaluation mode."""
        self.model = model.eval()
        self._temperature = temperature
        self._device = next(model.parameters()).device
        self._forbidden_ids = torch.tensor(forbidden_ids, dtype=torch.int64, device=self._device)

    @classmethod
    def load(
        cls, path: Path, *, temperature: float, forbidden_ids: Sequence[int], device: torch.device | str = "cpu"
    ) -> "PaddedPolicy":
        """Load a model folder in float32."""
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        has_images = hasattr(AutoConfig.from_pretrained(path), "vision_config")
        auto_class = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
        model = auto_class.from_pretrained(path, dtype=torch.float32)
        return cls(model.to(device), temperature=temperature, forbidden_ids=forbidden_ids)

    def logprobs(self, sequences: Sequence[TrainSequence]) -> torch.Tensor:
        """Return float32[N] of the samples in one micro-batch, sample by sample, with gradient."""
        shape = (len(sequences), max(map(len, sequences)))
        input_ids_BT, attention_mask_BT, image_mask_BT = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
        own_BT = torch.zeros(shape, dtype=torch.bool)
        for row, sequence in enumerate(sequences):
            width = len(sequence)
            input_ids_BT[row] = int(sequence.token_ids_X[0])  # padding that is never a placeholder
            input_ids_BT[row, :width] = torch.from_numpy(sequence.token_ids_X)
            attention_mask_BT[row, :width] = 1
            image_mask_BT[row, :width] = torch.from_numpy(sequence.image_mask_X.astype(np.int64))
            own_BT[row, :width] = torch.from_numpy(sequence.loss_mask_X)
        input_ids_BT, attention_mask_BT, image_mask_BT, own_BT = (
            tensor.to(self._device) for tensor in (input_ids_BT, attention_mask_BT, image_mask_BT, own_BT)
        )
        inputs: dict[str, Any] = {"input_ids": input_ids_BT, "attention_mask": attention_mask_BT}
        if images := [image for sequence in sequences for image in sequence.images]:
            inputs["mm_token_type_ids"] = image_mask_BT
            inputs["image_grid_thw"] = torch.tensor([image.grid_thw for image in images], device=self._device)
            inputs["mm_encoder_outputs"] = {"image": self._image_features(images)}
        hidden_BTH = self.model.base_model(**inputs, use_cache=False).last_hidden_state
        rows_N, columns_N = own_BT.nonzero(as_tuple=True)
        logits_NV = self.model.get_output_embeddings()(hidden_BTH[rows_N, columns_N - 1]).float() / self._temperature
        logits_NV = logits_NV.index_fill(1, self._forbidden_ids, -math.inf)
        targets_N = input_ids_BT[rows_N, columns_N]
        return logits_NV.gather(1, targets_N[:, None]).squeeze(1) - logits_NV.logsumexp(1)

    def _image_features(self, images: Sequence[Any]) -> Any:
        """Encode each different image once, and repeat its features for each occurrence."""
        different = list({id(image): image for image in images}.values())
        numbers = [[id(other) for other in different].index(id(image)) for image in images]
        pixels = torch.cat([image.pixel_values_PD for image in different]).to(self._device)
        grids = torch.tensor([image.grid_thw for image in different], device=self._device)
        output = self.model.base_model.get_image_features(pixels, grids, return_dict=True)
        output.pooler_output = tuple(output.pooler_output[number] for number in numbers)
        if getattr(output, "deepstack_features", None) is not None:
            output.deepstack_features = [tuple(layer[n] for n in numbers) for layer in output.deepstack_features]
        return output
