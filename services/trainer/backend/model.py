"""The policy: a transformers model that returns the log-probability of each token that the policy sampled.

Legend: B, T, N, I, U, P, D as in `batching.micro_batch`; H = hidden size.
"""

import inspect
from typing import Any

import torch

from penstock.errors import ConfigError
from services.trainer.backend.logprobs import TokenLogprobs, token_logprobs
from services.trainer.batching.micro_batch import MicroBatch


class PolicyModel(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Any causal language model of transformers, with or without images."""

    def __init__(
        self, model: Any, *, temperature: float, forbidden_ids: tuple[int, ...], gradient_checkpointing: bool = False
    ) -> None:
        """Wrap a transformers model; `load_policy` loads one from a folder.

        Raises:
            ConfigError: the model caps its logits, which the trainer does not reproduce.
        """
        super().__init__()
        text_config = model.config.get_text_config()
        if getattr(text_config, "final_logit_softcapping", None):
            raise ConfigError(f"models of type {model.config.model_type} cap their logits; choose another model")
        self.model = model
        self.temperature = temperature
        self._shares_image_features = "mm_encoder_outputs" in inspect.signature(model.base_model.forward).parameters
        self.register_buffer("forbidden_ids", torch.tensor(forbidden_ids, dtype=torch.int64), persistent=False)
        if gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train(gradient_checkpointing)  # only checkpointing needs the training mode; dropout is off

    def forward(self, batch: MicroBatch) -> TokenLogprobs:
        """Return the tempered logprob of each of the policy's own tokens, given all tokens before it, and entropies."""
        hidden_BTH = self._backbone(batch)
        hidden_NH = hidden_BTH[batch.rows_N, batch.columns_N - 1]
        targets_N = batch.input_ids_BT[batch.rows_N, batch.columns_N]
        return token_logprobs(
            self.model.get_output_embeddings(),
            hidden_NH,
            targets_N,
            vocab_size=self.model.config.get_text_config().vocab_size,
            temperature=self.temperature,
            forbidden_ids=self.forbidden_ids,
        )

    def _backbone(self, batch: MicroBatch) -> torch.Tensor:
        inputs: dict[str, Any] = {"input_ids": batch.input_ids_BT, "attention_mask": batch.attention_mask_BT}
        if batch.pixel_values_PD is not None:  # then neither of the other two is None
            assert batch.grid_thw_U3 is not None
            assert batch.image_numbers_I is not None
            inputs["mm_token_type_ids"] = batch.image_mask_BT
            inputs["image_grid_thw"] = batch.grid_thw_U3[batch.image_numbers_I]
            if self._shares_image_features:
                inputs["mm_encoder_outputs"] = {"image": self._image_features(batch)}
            else:
                sizes = batch.grid_thw_U3.prod(dim=-1).tolist()
                patches = batch.pixel_values_PD.split(sizes)
                inputs["pixel_values"] = torch.cat([patches[number] for number in batch.image_numbers_I.tolist()])
        hidden: torch.Tensor = self.model.base_model(**inputs, use_cache=False).last_hidden_state
        return hidden

    def _image_features(self, batch: MicroBatch) -> Any:
        """Run the vision tower once per different image and repeat its features at every occurrence."""
        output = self.model.base_model.get_image_features(batch.pixel_values_PD, batch.grid_thw_U3, return_dict=True)
        assert batch.image_numbers_I is not None
        numbers = batch.image_numbers_I.tolist()
        output.pooler_output = tuple(output.pooler_output[number] for number in numbers)
        if getattr(output, "deepstack_features", None) is not None:
            output.deepstack_features = [tuple(layer[n] for n in numbers) for layer in output.deepstack_features]
        return output
