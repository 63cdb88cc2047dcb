"""A push as announced, and the checks whether it can be received here."""

import asyncio
import dataclasses
import enum
import math
from collections.abc import Mapping
from typing import TypeAlias

from penstock.errors import ChecksumError, InvalidRequestError, NotReadyError
from penstock.v1 import rollout_pb2
from penstock.weights.adapters import AdapterSpecs, adapted_weights
from penstock.weights.manifest import Manifest
from services.rollout.engine.sglang_plugin.transports import (
    BroadcastTransport,
    DeltaTransport,
    DiskTransport,
    SharedMemoryTransport,
    Transport,
)
from services.rollout.engine.sglang_plugin.variables import HeldParameter
from services.rollout.engine.weight_sync.upload import Upload

Source: TypeAlias = (
    rollout_pb2.BroadcastSource | rollout_pb2.DiskSource | rollout_pb2.SharedMemorySource | rollout_pb2.DeltaSource
)


class Stage(enum.IntEnum):
    """The last completed step of a push."""

    PREPARED = 1
    PAUSED = 2
    RECEIVING = 3
    """Weights are changed from here on."""
    RECEIVED = 4
    VERIFIED = 5
    COMMITTED = 6


@dataclasses.dataclass(slots=True, kw_only=True)
class IncomingPush:
    """The push that the engine is receiving."""

    push_id: str
    version: int
    transport: Transport
    manifest: Manifest
    digest: str
    """The kind of digest requested by the trainer."""
    upload: Upload | None = None
    """Only with `delta`."""
    deadline_s: float
    """Seconds, as the trainer set it."""
    deadline: float
    """End of the deadline on the clock of `time.monotonic`."""
    stage: Stage = Stage.PREPARED
    held: dict[str, int] = dataclasses.field(default_factory=dict)
    """Digests of the received weights."""
    started: float
    """When its first call came, on the clock of `time.monotonic`."""
    abort_reason: str = ""
    """Why the push is aborted while one of its stages still runs."""


async def accept(
    source: Source, version: int, manifest: Manifest, *, held: int, is_sound: bool, num_ranks: int
) -> tuple[Transport, Upload | None]:
    """Return the engine's end of the announced transport and, with `delta`, the file for the upload.

    Args:
        source: Where the weights come from.
        version: Their policy version.
        manifest: The tensors.
        held: The engine's current version.
        is_sound: Whether all weights of the engine are of that version.
        num_ranks: Processes of the engine, each with a shard of the weights.

    Raises:
        InvalidRequestError: the source is impossible.
        NotReadyError: it cannot be used here.
    """
    match source:
        case rollout_pb2.BroadcastSource():
            return BroadcastTransport.accept(source, num_ranks=num_ranks), None
        case rollout_pb2.DiskSource():
            return await asyncio.to_thread(DiskTransport.accept, source, version, manifest), None
        case rollout_pb2.SharedMemorySource():
            return await asyncio.to_thread(SharedMemoryTransport.accept, source), None
        case rollout_pb2.DeltaSource():
            DeltaTransport.require_base(source, held=held, is_sound=is_sound, is_shared=num_ranks > 1)
            upload = await asyncio.to_thread(Upload, source.size_bytes)
            return DeltaTransport(path=upload.path, base_version=source.base_version), upload


def require_version(version: int, *, held: int, replaces_newer: bool) -> None:
    """Check that a push's version may follow the one that the engine holds.

    Raises:
        InvalidRequestError: it is older and may not replace a newer one, or below 1.
    """
    if version < max(1, 0 if replaces_newer else held):
        raise InvalidRequestError(f"policy_version = {version} is older than this engine's {held}; versions only grow")


def require_same(held: Mapping[str, int], sent: Mapping[str, int], manifest: Manifest) -> None:
    """Check that the engine holds the weights that the trainer has sent.

    Args:
        held: Digest of every parameter that the engine holds, by checkpoint name.
        sent: The trainer's.
        manifest: What the push has carried: all weights, or adapters of some.

    Raises:
        ChecksumError: some digests differ.
    """
    differing = sorted(name for name in held.keys() | sent.keys() if held.get(name) != sent.get(name))
    if not differing:
        return
    message = f"weights differ after the push in {len(differing)} parameters: {differing[:4]}"
    if not {spec.name for spec in manifest.tensors}.issuperset(differing):
        message += (
            "; only adapters are pushed, so the engine must have been started from the trainer's model.path, in its "
            "precision: set rollout.dtype and trainer.dtype alike, and start it again"
        )
    raise ChecksumError(message)


def require_repeatable(push: IncomingPush, *, version: int, committed: tuple[str, Mapping[str, int]] | None) -> None:
    """Check for equal weights if a version is pushed again, to heal this engine or by a restarted trainer.

    Args:
        push: The push, received.
        version: The version that the engine serves.
        committed: Kind and digests of its weights, if it has committed a push.

    Raises:
        NotReadyError: the engine serves other weights under this version.
    """
    if push.version != version or committed is None:
        return
    kind, digests = committed
    if kind == push.digest and digests != push.held:
        raise NotReadyError(
            f"policy_version = {push.version}: this engine has served other weights under this version; do two "
            "trainers publish? Stop one of them, or publish a newer version"
        )


def require_pausable(mode: rollout_pb2.PauseMode.ValueType, drain_s: float) -> None:
    """Check how a pause treats running requests.

    Raises:
        InvalidRequestError: the mode is unknown, or `drain_s` out of range.
    """
    if mode not in rollout_pb2.PauseMode.values():
        raise InvalidRequestError(f"mode = {mode} is unknown to this engine; trainer.weight_sync.mode lists them")
    if not (math.isfinite(drain_s) and drain_s >= 0):
        raise InvalidRequestError(f"drain_s = {drain_s} must be 0 or greater")


def require_fit(manifest: Manifest, expected: Mapping[str, HeldParameter], *, is_shared: bool) -> None:
    """Check that the manifest has exactly the engine's parameters, or adapters of some of them.

    Args:
        manifest: The tensors.
        expected: The engine's parameters by name.
        is_shared: Whether several processes each hold a shard of them.

    Raises:
        InvalidRequestError: the two differ.
    """
    if changed := adapted_weights(manifest):
        _require_adapters_fit(changed, expected)
        return
    pushed = {spec.name: spec for spec in manifest.tensors}
    missing, unknown = expected.keys() - pushed.keys(), pushed.keys() - expected.keys()
    if missing or unknown:
        raise InvalidRequestError(
            f"manifest does not fit this engine's model: {len(missing)} parameters are missing "
            f"{sorted(missing)[:3]}, {len(unknown)} are unknown {sorted(unknown)[:3]}; push named_parameters() of "
            "the same architecture"
        )
    for name, held in expected.items():
        spec = pushed[name]
        if (spec.dtype, spec.shape) != (held.dtype, held.shape):
            remedy = "set rollout.dtype and trainer.dtype alike, and start again"
            if spec.shape != held.shape:
                remedy = "give engine and trainer the same model.path"
                if is_shared:
                    remedy += ", and choose a rollout.tensor_parallel that divides its sizes: SGLang pads others"
            raise InvalidRequestError(
                f"manifest: {name} is {spec.dtype}{list(spec.shape)}, the engine holds {held.dtype}"
                f"{list(held.shape)}; {remedy}"
            )


def _require_adapters_fit(changed: Mapping[str, AdapterSpecs], expected: Mapping[str, HeldParameter]) -> None:
    for name, adapter in changed.items():
        held = expected.get(name)
        if held is None:
            raise InvalidRequestError(
                f"manifest: an adapter changes {name}, which this engine's model does not have; give engine and "
                "trainer the same model.path"
            )
        if held.shape != adapter.changed_shape:
            raise InvalidRequestError(
                f"manifest: an adapter changes {name} as {list(adapter.changed_shape)}, the engine holds "
                f"{list(held.shape)}; give engine and trainer the same model.path"
            )
