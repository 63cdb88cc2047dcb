"""The recording of an optimizer step: a folder with everything that the step reads besides the checkpoint.

    groups/
      step-000012/
        step.json                 order of the groups, the chunks in which they came, policy version, digests of
                                  weights and random state, environment
        settings.toml             the settings of the step
        group-000352.msgpack      each group as a worker published it
        demonstrations.msgpack    what the step learned beside them, as tokens
        image-<sha256>            each image of groups and demonstrations

Invariant: a folder named step-N can be replayed: it is written under another name and renamed, and later groups are
there before its step.json names them. Demonstrations are kept, not their place in the data: files may change or be gone
when the step is replayed, and so may the chat template. Each chunk is in it before it is computed, so a step that fails
can be replayed too, as far as it came. A step that is trained again replaces its recording.
"""

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from penstock import config as configuration
from penstock.bus.image_store import hash_of
from penstock.errors import ConfigError, CorruptMessageError, SetupError
from penstock.records import Group
from penstock.records.codec import decode, encode
from services.trainer.backend.environment import Environment
from services.trainer.replay.settings import StepSettings
from services.trainer.sft.sequences import RenderedDemonstration

_NAME = re.compile(r"step-(\d{6,})")
_DEMONSTRATIONS_FILE = "demonstrations.msgpack"


class StepInputs(msgspec.Struct, frozen=True, kw_only=True):
    """`step.json`: the inputs of a step, apart from settings and groups."""

    run_id: str
    step: int
    """Its number; the first step is 1."""
    policy_version: int
    """The published version, which the weights have before the step."""
    groups: tuple[int, ...]
    """Indices of the groups in the order of the batch."""
    chunks: tuple[int, ...] = ()
    """Groups in each chunk of the batch, in order; empty: it is one chunk."""
    num_demonstrations: int = 0
    """Demonstrations that the step learns beside its groups; 0 also in a step that ended before it came to them."""
    weights: str
    """Digest of the weights before the step."""
    random_state: str
    """Digest of torch's random state before the step."""
    environment: Environment


class _Demonstration(msgspec.Struct, frozen=True, kw_only=True):
    """A demonstration as its file has it."""

    token_ids: np.ndarray
    """int64, with one placeholder per image."""
    is_learned: np.ndarray
    """bool."""
    images: tuple[str, ...]
    """Content hashes, in the order of their placeholders."""


class _Demonstrations(msgspec.Struct, frozen=True, kw_only=True):
    """`demonstrations.msgpack`."""

    demonstrations: tuple[_Demonstration, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One recorded step."""

    inputs: StepInputs
    settings: StepSettings
    groups: tuple[Group, ...]
    """In the order of the batch."""
    images: Mapping[str, bytes]
    """Images of the groups, by content hash."""
    demonstrations: tuple[RenderedDemonstration, ...] = ()
    """In the order in which the step has them."""


def write_recording(
    folder: Path,
    inputs: StepInputs,
    settings: StepSettings,
    groups: Sequence[Group],
    images: Mapping[str, bytes],
) -> None:
    """Write a step's recording below `folder`; it replaces an earlier one of the same step."""
    final = step_folder(folder, inputs.step)
    partial = folder / f".{final.name}.partial"
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    (partial / "settings.toml").write_text(configuration.dump(settings), encoding="utf-8")
    _write_groups(partial, inputs, groups, images)
    remove_recording(folder, inputs.step)
    partial.rename(final)


def extend_recording(folder: Path, inputs: StepInputs, groups: Sequence[Group], images: Mapping[str, bytes]) -> None:
    """Add groups to a step's recording below `folder`; `inputs` are those of all its groups."""
    _write_groups(step_folder(folder, inputs.step), inputs, groups, images)


def extend_recording_by_demonstrations(
    folder: Path, inputs: StepInputs, demonstrations: Sequence[RenderedDemonstration]
) -> None:
    """Add what a step learns beside its groups to its recording below `folder`; `inputs` count it."""
    path = step_folder(folder, inputs.step)
    images = {hash_of(data): data for each in demonstrations for data in each.images}
    kept = [
        _Demonstration(
            token_ids=each.token_ids_T, is_learned=each.is_learned_T, images=tuple(map(hash_of, each.images))
        )
        for each in demonstrations
    ]
    (path / _DEMONSTRATIONS_FILE).write_bytes(encode(_Demonstrations(demonstrations=tuple(kept))))
    _write_inputs(path, inputs, images)


def remove_recording(folder: Path, step: int) -> None:
    """Remove a step's recording below `folder`, if there is one."""
    if (path := step_folder(folder, step)).exists():
        shutil.rmtree(path)


def read_recording(folder: Path, step: int, overrides: Sequence[str] = ()) -> Recording:
    """Read a step's recording, with `--section.key=value` overrides of its settings.

    Raises:
        SetupError: the step is not recorded, or its recording cannot be read.
        ConfigError: an override names no setting of a step, or one that the step does not read, or its value is wrong.
    """
    path = step_folder(folder, step)
    if not path.is_dir():
        recorded = describe_steps(recorded_steps(folder))
        raise SetupError(f"step {step} is not recorded in {folder}; {recorded}")
    settings = configuration.load(StepSettings, [path / "settings.toml"], overrides)
    try:
        inputs = msgspec.json.decode((path / "step.json").read_bytes(), type=StepInputs)
        _require_meant(inputs, overrides)
        groups = tuple(decode(_group_file(path, index).read_bytes(), Group) for index in inputs.groups)
        images = {sha256: _image_file(path, sha256).read_bytes() for group in groups for sha256 in sorted(group.images)}
        demonstrations = _read_demonstrations(path) if inputs.num_demonstrations else ()
    except (OSError, msgspec.MsgspecError, CorruptMessageError) as error:
        raise SetupError(f"the recording {path} is incomplete or damaged: {error}; take another step") from None
    return Recording(inputs=inputs, settings=settings, groups=groups, images=images, demonstrations=demonstrations)


def _require_meant(inputs: StepInputs, overrides: Sequence[str]) -> None:
    given = [override for override in overrides if override.startswith("--demonstrations.")]
    if given and not inputs.num_demonstrations:
        raise ConfigError(f"step {inputs.step} learned no demonstrations; leave out {given[0]}")


def recorded_steps(folder: Path) -> list[int]:
    """Return the steps recorded below `folder`, ascending."""
    matches = (_NAME.fullmatch(path.name) for path in folder.glob("step-*"))
    return sorted(int(match[1]) for match in matches if match)


def step_folder(folder: Path, step: int) -> Path:
    """Return the folder of the recording of `step`."""
    return folder / f"step-{step:06d}"


def describe_steps(steps: Sequence[int]) -> str:
    """Say which steps are recorded, or how to record them."""
    if not steps:
        return "no step is recorded; train with --trainer.record_groups=true"
    return f"recorded: {', '.join(map(str, steps)) if len(steps) <= 12 else f'{len(steps)} of {steps[0]}-{steps[-1]}'}"


def _write_groups(folder: Path, inputs: StepInputs, groups: Sequence[Group], images: Mapping[str, bytes]) -> None:
    """Write the files of groups, and then the inputs that name them."""
    for group in groups:
        _group_file(folder, group.id.index).write_bytes(encode(group))
    _write_inputs(folder, inputs, images)


def _write_inputs(folder: Path, inputs: StepInputs, images: Mapping[str, bytes]) -> None:
    """Write images, and then the inputs by which all files so far count."""
    for sha256, data in images.items():
        _image_file(folder, sha256).write_bytes(data)
    temporary = folder / ".step.json"
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(inputs), indent=1))
    temporary.rename(folder / "step.json")


def _read_demonstrations(folder: Path) -> tuple[RenderedDemonstration, ...]:
    kept = decode((folder / _DEMONSTRATIONS_FILE).read_bytes(), _Demonstrations).demonstrations
    return tuple(
        RenderedDemonstration(
            token_ids_T=each.token_ids,
            is_learned_T=each.is_learned,
            images=tuple(_image_file(folder, sha256).read_bytes() for sha256 in each.images),
        )
        for each in kept
    )


def _image_file(folder: Path, sha256: str) -> Path:
    return folder / f"image-{sha256}"


def _group_file(folder: Path, index: int) -> Path:
    return folder / f"group-{index:06d}.msgpack"
