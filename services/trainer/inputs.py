"""Opens the data of a run: prompts, pools, demonstrations and evaluation sets, as settings and checkpoint say."""

from services.trainer.admission.pools import RowPools
from services.trainer.checkpoint.store import Checkpoint
from services.trainer.config import TrainerSettings
from services.trainer.data.dataset import Dataset, open_dataset
from services.trainer.data.prompt_length import PromptLimit
from services.trainer.demonstrations.opening import open_demonstrations
from services.trainer.evaluation.sets import EvaluationSet, open_sets
from services.trainer.sft.batches import BatchesAhead
from services.trainer.starting_point import StartingPoint


def open_prompts(settings: TrainerSettings) -> Dataset:
    """Open the data set of the prompts. Blocks.

    Raises:
        UserError: a file or a row is wrong.
    """
    limit = PromptLimit.of_run(
        settings.model.path,
        context=settings.context_length,
        max_new_tokens=settings.sampling.max_new_tokens,
        max_prompt_tokens=settings.data.max_prompt_tokens,
        keep=settings.filters.overlong_prompts == "keep",
    )
    return open_dataset(settings.data, seed=settings.run.seed, limit=limit)


def open_pools(
    settings: TrainerSettings, dataset: Dataset, checkpoint: Checkpoint | None, *, next_position: int
) -> RowPools | None:
    """Return the pools by pass rate; None if no row is ever passed over."""
    config, seed = settings.data.pools, settings.run.seed
    if not config.are_used:
        return None
    num_rows = {name: len(source) for name, source in dataset.sources.items()}
    state = None if checkpoint is None else checkpoint.state.get("pools")
    if state is None:
        return RowPools(config, seed=seed, num_rows=num_rows, next_position=next_position)
    return RowPools.from_state(state, config, seed=seed, num_rows=num_rows, next_position=next_position)


def open_demonstration_batches(settings: TrainerSettings, start: StartingPoint) -> BatchesAhead | None:
    """Open what each step learns beside its groups; None if that is nothing. Blocks.

    Raises:
        UserError: a file or a row is wrong, or no demonstration is short enough.
    """
    if settings.demonstrations is None:
        return None
    return open_demonstrations(
        settings.demonstrations, settings.model.path, seed=settings.run.seed, position=start.demonstration_position
    )


def open_evaluation_sets(settings: TrainerSettings) -> dict[str, EvaluationSet]:
    """Open the sets that are played during training. Blocks.

    Raises:
        UserError: a file or a row is wrong, or a set has fewer rows than it wants.
    """
    return open_sets(settings.evaluation, settings.data) if settings.evaluation.is_in_training else {}
