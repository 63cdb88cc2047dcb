"""One rank's share of a row that several ranks compute together (Jacobs et al. 2023, "DeepSpeed Ulysses").

Outside attention each rank computes neighbouring tokens of the row, as equal in number as possible. In attention it
computes some of the heads for all tokens: an all-to-all exchange before it and another after it swap one division for
the other. Heads of keys and values are repeated where there are fewer of them than ranks.

Embeddings and the vision tower are computed for the whole row on each rank, which then takes its tokens' part. So a
gradient reaches every weight through each rank's own tokens alone, and its sum over the ranks is that of the row.

Legend: W = ranks that share the row, T = its tokens, S = those of this rank, N = the policy's own tokens, O = those of
them that this rank's tokens predict, H = attention heads, G = key/value heads, J = heads of this rank, D = head
dimension, F = tokens of images, L = layers with experts, E = experts of a layer, B = 2.
"""

import itertools
from typing import Any

import torch
import torch.distributed as dist

from services.trainer.backend.policy.exchange import Exchange
from services.trainer.backend.policy.logprobs import TokenLogprobs


class RowShare:
    """The tokens and heads of a row that a rank computes."""

    def __init__(self, num_tokens: int, *, size: int, number: int, group: Any) -> None:
        """Divide a row.

        Args:
            num_tokens: Its tokens, padding included.
            size: Ranks that share it.
            number: This rank's place among them.
            group: torch's process group of them, in this order.
        """
        edges = [num_tokens * each // size for each in range(size + 1)]
        self.tokens = slice(edges[number], edges[number + 1])
        """This rank's tokens of the row."""
        self._size = size
        self._group = group
        self._lengths = [stop - start for start, stop in itertools.pairwise(edges)]
        """Tokens of each rank."""
        self._num_own = self._lengths[number]

    def of_text_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the part of a language model's inputs that is this rank's.

        Args:
            inputs: Keyword arguments of transformers' language model, of a single row; `visual_pos_masks` has the
                numbers of its image tokens.
        """
        own = dict(inputs)
        own["position_ids"] = inputs["position_ids"][..., self.tokens]
        own["inputs_embeds"] = inputs["inputs_embeds"][:, self.tokens]
        if (tokens_F := inputs.get("visual_pos_masks")) is not None:
            is_own_F = (tokens_F >= self.tokens.start) & (tokens_F < self.tokens.stop)
            own["visual_pos_masks"] = tokens_F[is_own_F] - self.tokens.start
            own["deepstack_visual_embeds"] = [features[is_own_F] for features in inputs["deepstack_visual_embeds"]]
        return own

    def heads_of(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return all tokens' queries, keys and values for this rank's heads: [1, J, T, D] each.

        Args:
            query: [1, H, S, D].
            key: [1, G, S, D].
            value: [1, G, S, D]; its dtype is that of what is returned.
        """
        sent = [self._by_rank(states.to(value.dtype)) for states in (query, key, value)]
        num_heads = [states.shape[1] for states in sent]
        rows = torch.cat(sent, dim=1).transpose(1, 2).flatten(0, 1)  # [W * S, all of a rank's heads, D]
        received = self.exchange(rows, self._lengths, [self._num_own] * self._size)
        of_query, of_key, of_value = received.transpose(0, 1)[None].split(num_heads, dim=1)
        return of_query, of_key, of_value

    def tokens_of(self, output: torch.Tensor) -> torch.Tensor:
        """Return [1, S, H, D], all heads of this rank's tokens, given [1, T, J, D]."""
        rows = self.exchange(output[0], [self._num_own] * self._size, self._lengths)
        return rows.unflatten(0, (self._size, self._num_own)).transpose(0, 1).flatten(1, 2)[None]

    def predicted_by_own(self, predict_N: torch.Tensor) -> torch.Tensor:
        """Return int64[O]: which of the policy's own tokens this rank's tokens predict.

        Args:
            predict_N: The row's token that predicts each.
        """
        return ((predict_N >= self.tokens.start) & (predict_N < self.tokens.stop)).nonzero()[:, 0]

    def gathered(self, own: TokenLogprobs, own_O: torch.Tensor, num_predicted: int) -> TokenLogprobs:
        """Return what all ranks computed of the row; each is given the gradient of its own.

        Args:
            own: Of the own tokens that this rank's tokens predict.
            own_O: Which they are.
            num_predicted: N.
        """
        logprobs_N, entropy_N = _Gathered.apply(own.logprobs_N, own.entropy_N, own_O, num_predicted, self._group)
        counts_LE = own.expert_counts_LE
        if counts_LE is not None:
            dist.all_reduce(counts_LE, group=self._group)
        return TokenLogprobs(logprobs_N, entropy_N, counts_LE)

    def exchange(self, rows: torch.Tensor, num_received: list[int], num_sent: list[int]) -> torch.Tensor:
        """Send `num_sent` rows to each rank, and return the `num_received` that came from each, in their order."""
        exchanged: torch.Tensor = Exchange.apply(rows, num_received, num_sent, self._group)
        return exchanged

    def _by_rank(self, states: torch.Tensor) -> torch.Tensor:
        """Return [W, J, S, D], the heads of each rank, given [1, H, S, D]; each head is repeated if there are fewer."""
        num_heads = states.shape[1]
        if num_heads < self._size:
            states = states.repeat_interleave(self._size // num_heads, dim=1)
        return states[0].unflatten(0, (self._size, -1))


class _Gathered(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """Two numbers of each of a row's tokens, of which every rank has some and each token is some rank's."""

    @staticmethod
    def forward(
        context: Any, one_O: torch.Tensor, other_O: torch.Tensor, own_O: torch.Tensor, num_predicted: int, group: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both of all tokens."""
        context.save_for_backward(own_O)
        context.set_materialize_grads(False)
        numbers_BN = one_O.new_zeros(2, num_predicted)
        numbers_BN[:, own_O] = torch.stack([one_O, other_O])
        dist.all_reduce(numbers_BN, group=group)
        return numbers_BN[0].clone(), numbers_BN[1].clone()

    @staticmethod
    def backward(
        context: Any, of_one_N: torch.Tensor | None, of_other_N: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of this rank's own; all ranks compute the same loss of all tokens."""
        (own_O,) = context.saved_tensors
        of_one_O, of_other_O = (None if grad is None else grad[own_O] for grad in (of_one_N, of_other_N))
        return of_one_O, of_other_O, None, None, None
