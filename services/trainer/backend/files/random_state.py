"""The state of this process's random generators, as plain data and tensors that load without unpickling."""

import random
from typing import Any

import numpy as np
import torch
import xxhash


def capture_random_state() -> dict[str, Any]:
    """Return the state of Python's, numpy's and torch's global generators."""
    state: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, cached = state
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def random_state_digest() -> str:
    """Return a digest of torch's generators, the only ones that a step could draw from."""
    state = xxhash.xxh3_64()
    for generator in (torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])):
        state.update(memoryview(generator.cpu().numpy()))
    return state.hexdigest()


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore a state from `capture_random_state`; GPU generators only if the number of GPUs is the same."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.cpu().numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([generator.cpu() for generator in state["cuda"]])
