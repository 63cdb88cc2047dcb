"""Opens the demonstrations that a run learns beside its groups.

Invariant: which ones a step learns follows from the data, the settings, the run's seed and the position that the
checkpoint before it keeps.
"""

from pathlib import Path

from services.trainer.data.dataset import open_dataset
from services.trainer.data.named_section import named_section
from services.trainer.data.prompt_length import ConversationLimit
from services.trainer.data.sources.source import DEMONSTRATIONS
from services.trainer.demonstrations.config import DemonstrationsConfig
from services.trainer.sft.batches import BatchesAhead, BatchReader
from services.trainer.sft.sequences import DemonstrationReader


def open_demonstrations(config: DemonstrationsConfig, model_path: Path, *, seed: int, position: int) -> BatchesAhead:
    """Open the data, check their first rows, and return the batches from a position on. Blocks.

    Args:
        config: Which data, how to read it, and how many a step learns.
        model_path: Folder of the model, for its chat template and image processor.
        seed: Of the order of rows.
        position: At which the next step begins.

    Raises:
        UserError: a file or a row is wrong, or no demonstration is short enough.
    """
    with named_section("demonstrations"):
        limit = ConversationLimit.of_model(
            model_path, max_tokens=config.max_tokens, setting="demonstrations.max_tokens"
        )
        dataset = open_dataset(config, seed=seed, limit=limit, form=DEMONSTRATIONS)
        reader = BatchReader(dataset, DemonstrationReader.open(model_path), batch_size=config.samples_per_step)
    return BatchesAhead(reader, position)
