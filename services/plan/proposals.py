"""Settings with which a run that does not fit its GPUs may fit, the least costly first."""

from collections.abc import Iterator, Mapping

from services.plan.process_plan import Gpus
from services.plan.row_shapes import longest_sample
from services.recipe import Recipe

LEAST_ROW = 2048
"""Tokens of the shortest row that is proposed: shorter ones leave a GPU idle."""
USUAL_FRACTION = 0.85
"""Share of a GPU that an engine has to itself."""


def proposals(recipe: Recipe, gpus: Gpus) -> Iterator[dict[str, object]]:
    """Yield settings to try, with as few GPUs per engine as possible."""
    yield from _alternatives(recipe, gpus)
    size = 2 * recipe.rollout.tensor_parallel
    while size < gpus.count:
        larger: dict[str, object] = {"rollout.tensor_parallel": size}
        if recipe.rollout.expert_parallel > 1:
            larger["rollout.expert_parallel"] = size
        yield larger
        yield from (larger | settings for settings in _alternatives(changed(recipe, larger), gpus))
        size *= 2


def _alternatives(recipe: Recipe, gpus: Gpus) -> Iterator[dict[str, object]]:
    """Yield settings to try, the least costly first. Most include those before them."""
    trainer, rollout = recipe.trainer, recipe.rollout
    num_engines = rollout.replicas + rollout.prefill + rollout.decode
    settings: dict[str, object] = {}

    if gpus.count > 1 and rollout.gpu_memory_fraction != USUAL_FRACTION:  # with more a push may have no room
        settings = settings | {"rollout.gpu_memory_fraction": USUAL_FRACTION}
        yield settings
    if not trainer.gradient_checkpointing:
        settings = settings | {"trainer.gradient_checkpointing": True}
        yield settings
    tokens = trainer.micro_batch_tokens
    longest_demonstration = 0 if recipe.demonstrations is None else recipe.demonstrations.max_tokens
    while tokens // 2 >= max(LEAST_ROW, longest_sample(recipe)[0], longest_demonstration):
        tokens //= 2
        settings = settings | {"trainer.micro_batch_tokens": tokens}
        yield settings
    most = gpus.count - num_engines * rollout.tensor_parallel
    doubled = [2**power for power in range(1, max(1, most).bit_length())]
    replicas = trainer.hsdp_replicas
    for ranks in sorted({*doubled, most, trainer.ranks}):
        if trainer.ranks <= ranks <= most and ranks % replicas == 0:
            more: dict[str, object] = {"trainer.ranks": ranks} if ranks > trainer.ranks else {}
            if ranks > 1 and trainer.compile:
                more["trainer.compile"] = False  # for one rank only
            for expert_parallel in _divisions(ranks, trainer.expert_parallel):
                divided = {"trainer.expert_parallel": expert_parallel} if expert_parallel > 1 else {}
                if (more or divided) and not (divided and replicas > 1):
                    yield settings | more | divided
            for sequence_parallel in _divisions(ranks, 2 * trainer.sequence_parallel):
                yield settings | more | {"trainer.sequence_parallel": sequence_parallel}
    if not trainer.optimizer.offload:
        yield settings | {"trainer.optimizer.offload": True}
        if trainer.ranks < most and most % trainer.hsdp_replicas == 0:
            alone = {"trainer.compile": False} if trainer.compile else {}
            yield settings | {"trainer.ranks": most, "trainer.optimizer.offload": True} | alone
    if gpus.count == 1:
        for fraction in (0.6, 0.4, 0.2):
            if fraction < rollout.gpu_memory_fraction:
                yield settings | {"rollout.gpu_memory_fraction": fraction}
                yield settings | {"rollout.gpu_memory_fraction": fraction, "trainer.optimizer.offload": True}


def _divisions(ranks: int, least: int) -> Iterator[int]:
    """Yield numbers of ranks to try that divide or share something: `least` and its doubles that divide the ranks."""
    while least <= ranks:
        if ranks % least == 0:
            yield least
        least *= 2


def as_override(name: str, value: object) -> str:
    """Return a setting as the command line takes it."""
    return f"--{name}={str(value).lower() if isinstance(value, bool) else value}"


def changed(recipe: Recipe, settings: Mapping[str, object]) -> Recipe:
    """Return the recipe with other settings.

    Raises:
        pydantic.ValidationError: they exclude each other.
    """
    data = recipe.model_dump()
    for name, value in settings.items():
        *sections, last = name.split(".")
        section = data
        for key in sections:
            section = section[key]
        section[last] = value
    return Recipe(**data)
