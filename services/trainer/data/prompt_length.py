"""The length of a row's prompt, as the engine will count it: rendered with the chat template, images expanded."""

import threading
from pathlib import Path
from typing import Self

from penstock.errors import ConfigError
from penstock.model.chat_template import Renderer
from penstock.model.families.qwen_vl import ImageGrid
from penstock.model.images import read_sizes
from penstock.model.tokens import context_length, image_token_id
from services.trainer.data.lengths import model_digest
from services.trainer.data.rows.example import Example


class PromptLimit:
    """Which prompts leave room for an answer. Its methods may be called from any thread.

    What an environment adds to a row's messages is not known here and not counted.
    """

    def __init__(self, renderer: Renderer, grid: ImageGrid | None, *, max_tokens: int, model: str = "") -> None:
        """Measure with `renderer` and `grid`, which is None for a text-only model.

        Args:
            renderer: Of the model.
            grid: How the model's image processor cuts images.
            max_tokens: The most tokens of a prompt, images expanded.
            model: `model_digest` of the model.
        """
        self._renderer = renderer
        self._lock = threading.Lock()
        self._grid = grid
        self.max_tokens = max_tokens
        self.model = model

    @classmethod
    def of_run(
        cls, model_path: Path, *, context: int, max_new_tokens: int, max_prompt_tokens: int = 0, keep: bool = False
    ) -> Self | None:
        """Return the limit of a run; None if nothing limits its prompts.

        Args:
            model_path: Folder of the model.
            context: `rollout.context_length`; 0 is what the model allows.
            max_new_tokens: `sampling.max_new_tokens`.
            max_prompt_tokens: `data.max_prompt_tokens`; 0: no limit of its own.
            keep: Whether prompts that leave less room are played all the same; see `filters.overlong_prompts`.

        Raises:
            ConfigError: no prompt can fit, or the model has no chat template.
        """
        length = None if keep else context or context_length(model_path)
        if length is None:
            return cls.load(model_path, max_tokens=max_prompt_tokens) if max_prompt_tokens else None
        if max_new_tokens >= length:
            raise ConfigError(
                f"sampling.max_new_tokens = {max_new_tokens} leaves no room for a prompt in a context of {length} "
                "tokens; lower it, raise rollout.context_length, or play prompts with the room that is left by "
                "filters.overlong_prompts = 'keep'"
            )
        most = length - max_new_tokens
        return cls.load(model_path, max_tokens=min(most, max_prompt_tokens or most))

    @classmethod
    def load(cls, model_path: Path, *, max_tokens: int) -> Self:
        """Return a limit of `max_tokens`, measured with the model in a folder.

        Raises:
            ConfigError: the model has no chat template.
        """
        grid = None if image_token_id(model_path) is None else ImageGrid.of(model_path)
        return cls(Renderer.load(model_path), grid, max_tokens=max_tokens, model=model_digest(model_path))

    def num_tokens(self, example: Example) -> int:
        """Return the tokens of an example's prompt.

        Raises:
            InvalidRequestError: the chat template refuses the messages, or the model an image.
        """
        with self._lock:
            ids = self._renderer.render_prompt(example.messages, num_images=len(example.images), tools=example.tools)
            num_tokens = len(ids)
        if self._grid is not None:
            num_tokens += self._grid.num_added_tokens(read_sizes(example.images))
        return num_tokens
