"""Recorded calls: answers of the OpenAI-compatible API, stored for training.

Shapes: P = tokens of the prompt with one placeholder id per image; S = tokens that the policy sampled.
"""

from typing import Literal

import numpy as np

from penstock.records.record import Envelope
from penstock.records.sample import Sample, TokenSequence, Turn, Verdict, VersionSpan, check_sampled


class RecordedCall(Envelope, frozen=True, kw_only=True):
    """One answer to a client of the OpenAI-compatible frontend, with all data that training on it needs.

    P = tokens of the prompt with one placeholder id per image.
    """

    session: str
    """The client's name of the session; the calls of a session are stored in order."""
    request_id: str
    choice: int
    """Number among the answers to one request, from 0."""
    created: float
    """Time of storing, in seconds since 1970."""
    input_ids: np.ndarray
    """int32[P]"""
    images: tuple[bytes, ...]
    output_ids: np.ndarray
    """int32[S]: all sampled tokens, including the end token or the one that completed a stop string."""
    logprobs: np.ndarray
    """float32[S]: ln of each token's sampling probability, tempered."""
    version_spans: tuple[VersionSpan, ...]
    """Their lengths add up to S."""
    finish_reason: Literal["stop", "length"]
    temperature: float
    top_p: float
    top_k: int
    """0: no limit."""
    num_prompt_tokens: int
    """Tokens of the prompt as the engine counted them, image placeholders expanded."""
    num_cached_tokens: int
    text: str
    """The text sent to the client, without stop string and tool calls."""

    def __post_init__(self) -> None:
        check_sampled(self.input_ids, self.output_ids, self.logprobs, self.version_spans)

    def to_sample(self, verdict: Verdict, image_hashes: tuple[str, ...]) -> Sample:
        """Return the call as a sample to train on.

        Args:
            verdict: The call's verdict.
            image_hashes: Content hashes of `images`, under which the caller stored them.
        """
        num_prompt, num_own = len(self.input_ids), len(self.output_ids)
        sequence = TokenSequence(
            token_ids=np.concatenate([self.input_ids, self.output_ids]),
            loss_mask=np.arange(num_prompt + num_own) >= num_prompt,
            logprobs=np.concatenate([np.zeros(num_prompt, np.float32), self.logprobs]),
            version_spans=self.version_spans,
            images=image_hashes,
            num_prompt_tokens=self.num_prompt_tokens,
            num_last_turn_tokens=num_own,
        )
        turn = Turn(
            replica_id="",
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=num_own,
        )
        return Sample(
            sequences=(sequence,),
            reward=verdict.score if verdict.is_judged else None,
            finish_reason=self.finish_reason,
            verdict=verdict,
            turns=(turn,),
            text=self.text,
        )
