"""The policy: a transformers model that returns the log-probability of each token that the policy sampled.

Legend: A, T, N, J, L, K as in `batching.rows`; H = hidden size, S = tokens of the row that this rank computes: all,
unless ranks share rows.

On one GPU in half precision the forward pass of a dense model waits for nothing: kernels are queued while those of the
row before still run.
"""

from collections.abc import Callable
from typing import Any

import torch

from penstock.errors import ConfigError
from penstock.model.families.qwen_vl import TRAINED_MODEL_TYPES
from services.trainer.backend.policy.attention import RowLayout, use_packed_attention
from services.trainer.backend.policy.compiled import compile_layers
from services.trainer.backend.policy.experts.expert_counts import ExpertCounter
from services.trainer.backend.policy.experts.mixture import set_mixture_precision, use_grouped_products
from services.trainer.backend.policy.experts.router_replay import KEYWORD, replay_routers
from services.trainer.backend.policy.linear_attention import use_packed_linear_attention
from services.trainer.backend.policy.logprobs import TokenLogprobs, token_logprobs
from services.trainer.backend.policy.row_share import RowShare
from services.trainer.backend.policy.tower import image_features, use_tower_attention
from services.trainer.batching.rows import PackedRow


class PolicyModel(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A Qwen model of transformers, with or without images."""

    def __init__(
        self,
        model: Any,
        *,
        temperature: float,
        forbidden_ids: tuple[int, ...],
        float32_head: bool = False,
        gradient_checkpointing: bool = False,
        is_compiled: bool = False,
    ) -> None:
        """Wrap a transformers model; `load_policy` loads one from a folder.

        Raises:
            ConfigError: the model's type is not among `TRAINED_MODEL_TYPES`, or it attends in a way that packed rows
                do not reproduce; or it cannot be compiled.
        """
        super().__init__()
        model_type = model.config.model_type
        if model_type not in TRAINED_MODEL_TYPES:
            raise ConfigError(
                f"model.path: models of type {model_type} cannot be trained yet, because their packed rows are not "
                f"tested against transformers; choose one of type {', '.join(TRAINED_MODEL_TYPES)}"
            )
        self._has_images = hasattr(model.config, "vision_config")
        use_packed_attention(model, is_compiled=is_compiled)
        use_packed_linear_attention(model)
        if self._has_images:
            use_tower_attention(model.base_model.visual, is_compiled=is_compiled)
        use_grouped_products(model)
        set_mixture_precision(model)
        self._expert_counter = ExpertCounter(model)
        self.model = model
        replay_routers(self.text_layers)
        self._text_model.register_forward_pre_hook(_own_inputs, with_kwargs=True)
        self._text_model._deepstack_process = _add_at_images
        self._divide_row: Callable[[int], RowShare] | None = None
        self.temperature = temperature
        self._float32_head = float32_head
        self._is_compiled = is_compiled
        self._recomputes = gradient_checkpointing
        self.register_buffer("forbidden_ids", torch.tensor(forbidden_ids, dtype=torch.int64), persistent=False)
        if gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if is_compiled:
            blocks = model.base_model.visual.blocks if self._has_images else ()
            compile_layers(model, [*self.text_layers, *blocks])
        model.train(gradient_checkpointing)  # only checkpointing needs the training mode; dropout is off

    @property
    def text_layers(self) -> Any:
        """The layers that read the row, in order."""
        return self._text_model.layers

    @property
    def _text_model(self) -> Any:
        base = self.model.base_model
        return getattr(base, "language_model", base)

    def share_rows(self, divide_row: Callable[[int], RowShare]) -> None:
        """Compute only a share of each row from now on; `forward` returns what all ranks computed of it.

        Args:
            divide_row: Returns this rank's share of a row of the given number of tokens. All ranks that share a row
                call `forward` with it together, and go backward together.
        """
        self._divide_row = divide_row

    def forward(self, row: PackedRow, *, is_sampled: bool = True) -> TokenLogprobs:
        """Return the logprob of each of a row's own tokens, given all tokens before it, and entropies.

        Args:
            row: The row.
            is_sampled: Whether the policy has sampled them: then logits are divided by the temperature, and forbidden
                ids removed. Otherwise they are those of a plain forward pass.
        """
        predict_N, targets_N, own_N, share = row.predict_N, row.targets_N, None, None
        if self._divide_row is not None:
            share = self._divide_row(len(row.input_ids_T))
            own_N = share.predicted_by_own(predict_N)
            predict_N, targets_N = predict_N[own_N] - share.tokens.start, targets_N[own_N]
        with self._expert_counter.counting(predict_N) as counts_E:
            hidden_SH = self._backbone(row, share)
        head = self.model.get_output_embeddings()
        logprobs = token_logprobs(
            hidden_SH[predict_N],
            head.weight,
            targets_N,
            temperature=self.temperature if is_sampled else 1.0,
            forbidden_ids=self.forbidden_ids if is_sampled else self.forbidden_ids[:0],
            bias_V=head.bias,
            float32_head=self._float32_head,
            is_compiled=self._is_compiled,
            keeps_products=not self._recomputes,
        )
        if counts_E:
            logprobs = logprobs._replace(expert_counts_LE=torch.stack(counts_E))
        return logprobs if share is None else share.gathered(logprobs, own_N, len(row.predict_N))

    def _backbone(self, row: PackedRow, share: RowShare | None) -> torch.Tensor:
        """Return [S, H]: the last hidden states."""
        # All four axes: with three, transformers would treat the row as one sequence; with one, images as text.
        positions = row.positions_AT[:, None] if self._has_images else row.positions_AT[:1]
        optional: dict[str, Any] = {} if share is None else {"row_share": share}
        if (experts_TLK := row.routed_experts_TLK) is not None:
            optional[KEYWORD] = experts_TLK if share is None else experts_TLK[share.tokens]
        embeddings_TH = self.model.get_input_embeddings()(row.input_ids_T)
        if row.pixel_values_PD is not None:
            images = image_features(self.model.base_model.visual, row)
            features_JH = images.features_JW.to(embeddings_TH.dtype)
            embeddings_TH = embeddings_TH.index_copy(0, row.image_tokens_J, features_JH)
            if images.deepstack:
                optional |= {"visual_pos_masks": row.image_tokens_J, "deepstack_visual_embeds": images.deepstack}
        layout = RowLayout(row.segments, row.input_ids_T.device)
        if self._is_compiled:
            layout.make_varlen_index()
        output = self._text_model(
            inputs_embeds=embeddings_TH[None],
            position_ids=positions,
            use_cache=False,
            row_layout=layout,
            **optional,
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden


def _own_inputs(_: Any, args: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give the language model this rank's share of the row."""
    share: RowShare | None = inputs.get("row_share")
    return args, inputs if share is None else share.of_text_inputs(inputs)


def _add_at_images(hidden: torch.Tensor, image_tokens_J: torch.Tensor, features_JH: torch.Tensor) -> torch.Tensor:
    """Do what transformers' own method does, given numbers of tokens in place of a mask, which a GPU would count."""
    return hidden.index_add(1, image_tokens_J, features_JH.to(hidden.dtype)[None])
