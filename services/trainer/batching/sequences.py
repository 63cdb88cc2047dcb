"""Turns groups from the workers into sequences for the model.

Legend: T = tokens of a sample with one placeholder per image, X = the same with placeholders expanded, R = those of X
whose experts the engine recorded, L = layers, K = experts of a token.

Invariant: a sequence has exactly the tokens of the engine's forward pass. Each image's single placeholder is expanded
to the number that the image processor's grid gives, and the total is checked against the engine's count.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from penstock.errors import InvalidRequestError
from penstock.model.families.experts import MixtureShape, mixture_shape
from penstock.model.tokens import forbidden_token_ids, image_token_id, vocab_size
from penstock.records import Group, TokenSequence
from services.trainer.admission.filters import Screening
from services.trainer.batching.images import ImagePatcher, ImagePatches


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainSequence:
    """One sequence of a sample, expanded."""

    token_ids_X: np.ndarray
    """int64[X]."""
    loss_mask_X: np.ndarray
    """bool[X]: the policy's own tokens."""
    engine_logprobs_X: np.ndarray
    """float32[X]: 0 for tokens that are not the policy's own."""
    versions_X: np.ndarray
    """int64[X]: policy version that sampled the token; -1 for tokens that are not the policy's own."""
    image_mask_X: np.ndarray
    """bool[X]: placeholders."""
    images: tuple[ImagePatches, ...]
    """Images in the order of their placeholders. Equal images of a group share one object."""
    routed_experts_RLK: np.ndarray | None = None
    """uint8 or int32[R, L, K]: experts that computed the first R tokens in the engine; None: of no token."""

    def __len__(self) -> int:
        """Return X."""
        return len(self.token_ids_X)

    @property
    def num_own_tokens(self) -> int:
        """Tokens that the policy sampled."""
        return int(self.loss_mask_X.sum())

    @property
    def num_inputs(self) -> int:
        """Tokens that the model must read: those before the last own token, which itself is only predicted."""
        return int(np.flatnonzero(self.loss_mask_X)[-1])

    @property
    def num_routed(self) -> int:
        """R, of the tokens that the model must read."""
        return 0 if self.routed_experts_RLK is None else min(len(self.routed_experts_RLK), self.num_inputs)

    @property
    def image_starts(self) -> list[int]:
        """Index of each image's first placeholder."""
        starts: list[int] = np.flatnonzero(np.diff(self.image_mask_X.astype(np.int8), prepend=0) == 1).tolist()
        return starts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainGroup:
    """A group that passed every check and is ready to train."""

    index: int
    attempt: int
    oldest_version: int
    samples: tuple[tuple[TrainSequence, ...], ...]
    """The sequences of each sample, at least one."""
    rewards: tuple[float, ...]
    """Reward of each sample; NaN if it was not judged: it has no gradient and does not count in its group's mean."""
    masked: tuple[bool, ...] = ()
    """Whether each sample has no gradient; it still counts in its group's mean and in denominators. Empty: none is."""
    numbers: tuple[int, ...] = ()
    """Number of each sample in the group as it was played. Empty: all samples are here, in their order."""

    @property
    def sequences(self) -> tuple[TrainSequence, ...]:
        """The sequences of all samples, sample by sample."""
        return tuple(sequence for sample in self.samples for sequence in sample)

    def screened(self, screening: Screening) -> "TrainGroup":
        """Return the group after filtering."""
        return replace(
            self,
            samples=tuple(self.samples[number] for number in screening.kept),
            numbers=tuple(screening.kept),
            rewards=screening.rewards,
            masked=screening.masked,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTokens:
    """The token ids of a model that the trainer needs."""

    vocab_size: int
    """Every id is below this."""
    image_id: int | None
    """The image placeholder; None for a text-only model."""
    forbidden_ids: frozenset[int]
    """Ids that the policy can never sample (penstock.model.tokens)."""
    mixture: MixtureShape | None = None
    """Shape of a mixture of experts; None for a dense model."""


class GroupReader:
    """Checks and expands groups. Slow for large images, so call it from a thread."""

    def __init__(self, tokens: ModelTokens, patcher: Callable[[bytes], ImagePatches] | None) -> None:
        """Use the model's ids and its image patcher; `patcher` is None for a text-only model."""
        self._tokens = tokens
        self._patcher = patcher

    def read(self, group: Group, images: Mapping[str, bytes]) -> TrainGroup:
        """Return the expanded group.

        Args:
            group: The group.
            images: Encoded images by content hash: at least the group's.

        Raises:
            InvalidRequestError: the group failed, or one of its samples contradicts itself or the model. The message
                names group and sample, what was expected and what was found.
        """
        if group.error:
            raise InvalidRequestError(f"group {group.id.group} failed and has no samples: {group.error}")
        patches: dict[str, ImagePatches] = {}
        samples = []
        for number, sample in enumerate(group.samples):
            try:
                samples.append(
                    tuple(
                        self._expand(
                            sequence, tuple(self._patches(sha256, images, patches) for sha256 in sequence.images)
                        )
                        for sequence in sample.sequences
                    )
                )
            except InvalidRequestError as error:
                raise InvalidRequestError(f"group {group.id.group}, sample {number}: {error}") from None
        return TrainGroup(
            index=group.id.index,
            attempt=group.id.attempt,
            oldest_version=group.oldest_version,
            samples=tuple(samples),
            rewards=tuple(math.nan if sample.reward is None else sample.reward for sample in group.samples),
        )

    def _patches(self, sha256: str, images: Mapping[str, bytes], known: dict[str, ImagePatches]) -> ImagePatches:
        if self._patcher is None:
            raise InvalidRequestError(
                "it has an image, but the model reads text only; choose another model or data set"
            )
        if sha256 not in images:
            raise InvalidRequestError(f"its image {sha256} is missing; store it beside the group")
        if sha256 not in known:
            known[sha256] = self._patcher(images[sha256])
        return known[sha256]

    def _expand(self, sequence: TokenSequence, images: tuple[ImagePatches, ...]) -> TrainSequence:
        ids_T = sequence.token_ids.astype(np.int64)
        own_T = sequence.loss_mask
        if ids_T.min() < 0 or ids_T.max() >= self._tokens.vocab_size:
            bad = ids_T[(ids_T < 0) | (ids_T >= self._tokens.vocab_size)][0]
            raise InvalidRequestError(f"token id {bad} is outside the vocabulary of {self._tokens.vocab_size} ids")
        if own_T[0]:
            raise InvalidRequestError("its first token is the policy's own, so it has no prompt")
        if forbidden := self._tokens.forbidden_ids.intersection(ids_T[own_T].tolist()):
            raise InvalidRequestError(
                f"the policy sampled the forbidden token ids {sorted(forbidden)}; the engine must mask what "
                "penstock.model.tokens lists for this model"
            )
        is_image_T, repeats_T = find_placeholders(ids_T, images, image_id=self._tokens.image_id)
        own_X = np.repeat(own_T, repeats_T)
        self._check_prompt_length(sequence, own_X)
        versions_T = np.full(len(ids_T), -1, dtype=np.int64)
        spans = sequence.version_spans
        versions_T[own_T] = np.repeat([span.policy_version for span in spans], [span.num_tokens for span in spans])
        return TrainSequence(
            token_ids_X=np.repeat(ids_T, repeats_T),
            loss_mask_X=own_X,
            engine_logprobs_X=np.repeat(np.where(own_T, sequence.logprobs, np.float32(0)), repeats_T),
            versions_X=np.repeat(versions_T, repeats_T),
            image_mask_X=np.repeat(is_image_T, repeats_T),
            images=images,
            routed_experts_RLK=self._experts(sequence),
        )

    def _experts(self, sequence: TokenSequence) -> np.ndarray | None:
        experts_RLK, mixture = sequence.routed_experts, self._tokens.mixture
        if experts_RLK is None:
            return None
        shape = list(experts_RLK.shape[1:])
        expected = [] if mixture is None else [mixture.num_layers, mixture.num_experts_per_token]
        if mixture is None or shape != expected:
            raise InvalidRequestError(
                f"the engine recorded experts of shape {shape}, and the model has {expected} (layers, experts of a "
                "token): both must use the same model folder"
            )
        if experts_RLK.size and not 0 <= experts_RLK.min() <= experts_RLK.max() < mixture.num_experts:
            raise InvalidRequestError(
                f"the engine recorded experts {experts_RLK.min()} to {experts_RLK.max()}, and the model has "
                f"{mixture.num_experts}: both must use the same model folder"
            )
        return experts_RLK

    @staticmethod
    def _check_prompt_length(sequence: TokenSequence, own_X: np.ndarray) -> None:
        """Check that the last turn begins at the engine's count of prompt tokens."""
        positions = np.flatnonzero(own_X)
        num_last = sequence.num_last_turn_tokens
        if not 1 <= num_last <= len(positions):
            raise InvalidRequestError(f"its last turn claims {num_last} of the policy's {len(positions)} own tokens")
        if (num_prompt := int(positions[-num_last])) != sequence.num_prompt_tokens:
            raise InvalidRequestError(
                f"the engine counted {sequence.num_prompt_tokens} prompt tokens in the last turn, the trainer "
                f"{num_prompt}: both must use the same model folder and image processor, and the engine must have seen "
                "every image"
            )


def find_placeholders(
    ids_T: np.ndarray, images: Sequence[ImagePatches], *, image_id: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return bool[T], which ids are placeholders, and int64[T], how often each id occurs in the expanded sequence.

    Args:
        ids_T: int64[T]: ids with one placeholder per image.
        images: Images in the order of their placeholders.
        image_id: The placeholder; None for a text-only model.

    Raises:
        InvalidRequestError: placeholders and images differ in number, or a placeholder is at an invalid place.
    """
    is_image_T = ids_T == image_id if image_id is not None else np.zeros(len(ids_T), dtype=bool)
    if is_image_T[0]:
        raise InvalidRequestError("its first token is an image placeholder; chat templates put something before it")
    if (is_image_T[1:] & is_image_T[:-1]).any():
        raise InvalidRequestError(
            "two image placeholders stand side by side; chat templates put something between them"
        )
    if (num_placeholders := int(is_image_T.sum())) != len(images):
        raise InvalidRequestError(f"it has {num_placeholders} image placeholders, but {len(images)} images")
    repeats_T = np.ones(len(ids_T), dtype=np.int64)
    repeats_T[is_image_T] = [image.num_placeholders for image in images]
    return is_image_T, repeats_T


def open_reader(model_path: Path) -> GroupReader:
    """Return a reader for the model in `model_path`, without reading its weights.

    Raises:
        ConfigError: the folder has no model, or an image model without its image processor.
    """
    image_id = image_token_id(model_path)
    tokens = ModelTokens(
        vocab_size=vocab_size(model_path),
        image_id=image_id,
        forbidden_ids=frozenset(forbidden_token_ids(model_path)),
        mixture=mixture_shape(model_path),
    )
    return GroupReader(tokens, None if image_id is None else ImagePatcher(model_path))
