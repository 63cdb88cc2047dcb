"""The policy with its optimizer, and what reads groups for it, from a model folder or a checkpoint."""

from pathlib import Path

import torch

from penstock.model.tokens import forbidden_token_ids
from services.trainer.backend.model import load_policy
from services.trainer.backend.optimizer import PolicyOptimizer
from services.trainer.batching.images import ImagePatcher
from services.trainer.batching.sequences import GroupReader, ModelTokens
from services.trainer.config import BackendConfig


def open_policy(
    base_path: Path, checkpoint: Path | None, *, seed: int, temperature: float, config: BackendConfig
) -> tuple[PolicyOptimizer, GroupReader]:
    """Load the weights, and the optimizer's state where there is a checkpoint. Blocks.

    Args:
        base_path: Model folder that the run began with; tokens and image processor are read from it.
        checkpoint: Folder of the checkpoint to go on from; None starts from `base_path`.
        seed: Of torch's generator, in a run that starts from `base_path`.
        temperature: Of the sampling that is trained.
        config: How steps are computed.

    Raises:
        ConfigError: a folder holds no model that can be loaded.
    """
    torch.manual_seed(seed)
    forbidden = forbidden_token_ids(base_path)
    policy = load_policy(
        base_path if checkpoint is None else checkpoint / "model",
        temperature=temperature,
        forbidden_ids=forbidden,
        gradient_checkpointing=config.gradient_checkpointing,
    )
    optimizer = PolicyOptimizer(policy, config)
    if checkpoint is not None:
        optimizer.load(checkpoint)
    model_config = policy.model.config
    image_id = getattr(model_config, "image_token_id", None)
    tokens = ModelTokens(
        vocab_size=model_config.get_text_config().vocab_size, image_id=image_id, forbidden_ids=frozenset(forbidden)
    )
    return optimizer, GroupReader(tokens, None if image_id is None else ImagePatcher(base_path))
