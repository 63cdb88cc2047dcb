"""The policy: a transformers model that answers with the logprob of each token that the policy itself produced.

Legend: B, T, N, I, U, P, D as in `packing`; H = hidden size, V = vocabulary, W = tokens of one slice of N.

Convention, the engine's too: logits are divided by the temperature, forbidden ids are removed, then log_softmax in
float32, before any top-k or top-p. Logits are made at the N predicted positions only, and in slices where N * V is
large.
"""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from penstock.errors import ConfigError
from penstock.model.families.qwen_vl import published_name
from services.trainer.batching.micro_batch import MicroBatch

MAX_LOGITS = 2**27
"""Logits that exist at one time: half a GiB in float32. Beyond it they are made in slices and again in the backward
pass."""


class PolicyModel(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Any causal language model of transformers, with or without images."""

    def __init__(
        self, model: Any, *, temperature: float, forbidden_ids: tuple[int, ...], gradient_checkpointing: bool = False
    ) -> None:
        """Wrap a transformers model; `load_policy` makes one from a folder.

        Raises:
            ConfigError: the model changes its logits in a way that is not reproduced here.
        """
        super().__init__()
        text_config = model.config.get_text_config()
        if getattr(text_config, "final_logit_softcapping", None):
            raise ConfigError(f"models of type {model.config.model_type} cap their logits; the trainer does not")
        self.model = model
        self.temperature = temperature
        self._shares_image_features = "mm_encoder_outputs" in inspect.signature(model.base_model.forward).parameters
        self.register_buffer("forbidden_ids", torch.tensor(forbidden_ids, dtype=torch.int64), persistent=False)
        if gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train(gradient_checkpointing)  # only that needs the training mode; dropout is none of ours

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """Return float32[N]: the tempered logprob of each of the policy's own tokens given all before it."""
        hidden_BTH = self._backbone(batch)
        hidden_NH = hidden_BTH[batch.rows_N, batch.columns_N - 1]
        targets_N = batch.input_ids_BT[batch.rows_N, batch.columns_N]
        width = max(1, MAX_LOGITS // self.model.config.get_text_config().vocab_size)
        if len(targets_N) <= width:
            return self._logprobs(hidden_NH, targets_N)
        slices = zip(hidden_NH.split(width), targets_N.split(width), strict=True)
        return torch.cat([checkpoint(self._logprobs, *one, use_reentrant=False) for one in slices])

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter under transformers' name, tied ones once, in a fixed order."""
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()

    def _backbone(self, batch: MicroBatch) -> torch.Tensor:
        inputs: dict[str, Any] = {"input_ids": batch.input_ids_BT, "attention_mask": batch.attention_mask_BT}
        if batch.pixel_values_PD is not None:  # then the other two are not None either
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
        """Run the vision tower once for each different image and repeat the features where it occurs."""
        output = self.model.base_model.get_image_features(batch.pixel_values_PD, batch.grid_thw_U3, return_dict=True)
        assert batch.image_numbers_I is not None
        numbers = batch.image_numbers_I.tolist()
        output.pooler_output = tuple(output.pooler_output[number] for number in numbers)
        if getattr(output, "deepstack_features", None) is not None:
            output.deepstack_features = [tuple(layer[n] for n in numbers) for layer in output.deepstack_features]
        return output

    def _logprobs(self, hidden_WH: torch.Tensor, targets_W: torch.Tensor) -> torch.Tensor:
        logits_WV = self.model.get_output_embeddings()(hidden_WH).float() / self.temperature
        logits_WV = logits_WV.index_fill(1, self.forbidden_ids, float("-inf"))
        return logits_WV.gather(1, targets_W[:, None]).squeeze(1) - logits_WV.logsumexp(dim=1)


def load_policy(
    path: Path, *, temperature: float, forbidden_ids: tuple[int, ...], gradient_checkpointing: bool = False
) -> PolicyModel:
    """Load a checkpoint in the layout of transformers, in float32, on the CPU, without dropout.

    Args:
        path: Folder of the checkpoint.
        temperature: Of the sampling that is trained.
        forbidden_ids: From penstock.model.tokens.
        gradient_checkpointing: Recompute activations in the backward pass.

    Raises:
        ConfigError: the folder holds no model that can be loaded, or one whose parameters do not carry the names of its
            checkpoint (they could not be pushed to an engine).
    """
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(path)
        parts: list[Any] = [config, config.get_text_config(), getattr(config, "vision_config", None)]
        for part in parts:
            if getattr(part, "attention_dropout", 0.0):
                part.attention_dropout = 0.0
        auto_class = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
        model = auto_class.from_pretrained(path, config=config, dtype=torch.float32)
    except SafetensorError as error:
        files = ", ".join(str(file) for file in sorted(path.glob("*.safetensors")) if not _is_whole(file))
        raise ConfigError(f"model.path: {files or path} is no safetensors file, or part of one ({error})") from None
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.path {str(path)!r} cannot be loaded: {error}") from None
    policy = PolicyModel(
        model, temperature=temperature, forbidden_ids=forbidden_ids, gradient_checkpointing=gradient_checkpointing
    )
    _check_names(path, policy)
    return policy


def _is_whole(file: Path) -> bool:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt"):
            return True
    except SafetensorError:
        return False


def _check_names(path: Path, policy: PolicyModel) -> None:
    """Compare the names that would be pushed with those of the checkpoint; tied copies may be on either side."""
    from safetensors import safe_open

    in_checkpoint: set[str] = set()
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            in_checkpoint.update(tensors.keys())
    model_type = policy.model.config.model_type
    ours = {published_name(name, model_type) for name, _ in policy.named_weights()}
    missing = sorted(ours - in_checkpoint)
    extra = sorted(name for name in in_checkpoint - ours if not name.endswith("lm_head.weight"))
    if in_checkpoint and (missing or extra):
        raise ConfigError(
            f"model.path {str(path)!r}: {len(missing)} parameters are not in the checkpoint (such as {missing[:1]}), "
            f"{len(extra)} of the checkpoint not in the model (such as {extra[:1]}); this type of model is unsupported"
        )
