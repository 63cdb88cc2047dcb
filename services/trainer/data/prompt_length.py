"""Measures a row's prompt as the engine will count it: rendered with the chat template, images expanded. In supervised
training, measures its whole conversation."""

import threading
from pathlib import Path
from typing import Final, Self

from penstock.errors import ConfigError
from penstock.model.chat.chat_template import Renderer
from penstock.model.families.qwen_vl import ImageGrid
from penstock.model.images import read_sizes
from penstock.model.tokens import context_length, image_token_id
from services.trainer.data.lengths import model_digest
from services.trainer.data.rows.example import Example

_UNLIMITED: Final = 2**31 - 1


class PromptLimit:
    """Decides which prompts leave room for an answer. Its methods may be called from any thread.

    Messages that an environment adds to a row's are unknown here and not counted.
    """

    kept_tokens: int | None = None
    """Most tokens of a prompt that is played although it leaves less room; None: such prompts are passed over."""

    def __init__(self, renderer: Renderer, grid: ImageGrid | None, *, max_tokens: int, model: str = "") -> None:
        """Measure with `renderer` and `grid`, which is None for a text-only model.

        Args:
            renderer: The model's renderer.
            grid: How the model's image processor cuts images.
            max_tokens: Most tokens of a prompt that leaves room for an answer, images expanded.
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
        """Return the limit of a run; None if nothing is known that limits its prompts.

        Args:
            model_path: Folder of the model.
            context: `rollout.context_length`; 0 means the model's limit.
            max_new_tokens: `sampling.max_new_tokens`.
            max_prompt_tokens: `data.max_prompt_tokens`; 0: no further limit.
            keep: Whether prompts that leave less room are still played; see `filters.overlong_prompts`.

        Raises:
            ConfigError: no prompt can fit, or the model has no chat template.
        """
        length = context or context_length(model_path)
        if length is None:
            return cls.load(model_path, max_tokens=max_prompt_tokens) if max_prompt_tokens else None
        if max_new_tokens >= length and not keep:
            raise ConfigError(
                f"sampling.max_new_tokens = {max_new_tokens} leaves no room for a prompt in a context of {length} "
                "tokens; lower it, raise rollout.context_length, or play prompts with the room that is left by "
                "filters.overlong_prompts = 'keep'"
            )
        most = max(0, length - max_new_tokens)
        limit = cls.load(model_path, max_tokens=min(most, max_prompt_tokens or most))
        if keep:
            limit.kept_tokens = max_prompt_tokens or _UNLIMITED
        return limit

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
            InvalidRequestError: the chat template rejects the messages, or the model an image.
        """
        with self._lock:
            num_tokens = self._num_rendered(self._renderer, example)
        if self._grid is not None:
            num_tokens += self._grid.num_added_tokens(read_sizes(example.images))
        return num_tokens

    def num_learned(self, example: Example) -> int:
        """Return how many tokens of the example are learned: 0 for a prompt."""
        return 0

    def room(self, budget: int | None) -> int:
        """Return the most tokens of a prompt that leaves room for an answer.

        Args:
            budget: `limits.max_tokens` of its episodes, prompt and answers together; None: no budget.
        """
        return self.max_tokens if budget is None else min(self.max_tokens, budget - 1)

    def played(self, budget: int | None) -> int:
        """Return the most tokens of a prompt that is played; `budget` is as for `room`."""
        if self.kept_tokens is None:
            return self.room(budget)
        return self.kept_tokens if budget is None else min(self.kept_tokens, budget - 1)

    def refusal(self, *, num_rows: int, shortest: int, budget: int | None = None) -> str:
        """Return an error message with a remedy for a source whose rows are all too long.

        Args:
            num_rows: Number of rows.
            shortest: Tokens of the shortest row.
            budget: As for `room`.
        """
        remedy = (
            "raise rollout.context_length, lower sampling.max_new_tokens, or play them with the room that is left by "
            "filters.overlong_prompts = 'keep'; data.max_prompt_tokens is another limit"
        )
        room = self.played(budget)
        if shortest <= room:
            return (
                f"all {num_rows} prompts leave no room for an answer in their rows' own max_tokens, the shortest of "
                f"them {shortest}; raise max_tokens in the rows' own limits"
            )
        if room < self.max_tokens:
            remedy = f"raise data.limits.max_tokens = {budget}, the budget of prompt and answers together"
        return (
            f"all {num_rows} prompts are longer than the {room} tokens that leave room for an answer, the shortest of "
            f"them {shortest}; {remedy}"
        )

    def _num_rendered(self, renderer: Renderer, example: Example) -> int:
        """Return the number of tokens with one placeholder for each image."""
        ids = renderer.render_prompt(
            example.messages,
            num_images=len(example.images),
            tools=example.tools,
            template_kwargs=example.chat_template_kwargs,
        )
        return len(ids)


class ConversationLimit(PromptLimit):
    """Decides which demonstrations are short enough to learn from."""

    setting = "sft.max_tokens"
    """Which setting bounds them, for errors."""

    @classmethod
    def of_model(cls, model_path: Path, *, max_tokens: int, setting: str = setting) -> Self:
        """Return the limit of a setting, or what the model allows, if that is less.

        Args:
            model_path: Folder of the model.
            max_tokens: The setting's value; 0: what the model allows.
            setting: Its name, for errors.

        Raises:
            ConfigError: the model has no chat template.
        """
        bounds = [bound for bound in (max_tokens, context_length(model_path)) if bound]
        limit = cls.load(model_path, max_tokens=min(bounds, default=_UNLIMITED))
        limit.setting = setting
        return limit

    def num_learned(self, example: Example) -> int:
        """Return how many of the assistant's tokens are learned.

        Raises:
            InvalidRequestError: the chat template rejects the messages.
        """
        _, is_learned = self._render(self._renderer, example)
        return sum(is_learned)

    def refusal(self, *, num_rows: int, shortest: int, budget: int | None = None) -> str:
        """Return an error message for a source whose rows are all too long; see `PromptLimit.refusal`."""
        return (
            f"all {num_rows} conversations are longer than the {self.max_tokens} tokens that are trained on, the "
            f"shortest of them {shortest}; raise {self.setting}, up to the model's context, or shrink the images with "
            "data.max_pixels"
        )

    def _num_rendered(self, renderer: Renderer, example: Example) -> int:
        ids, _ = self._render(renderer, example)
        return len(ids)

    def _render(self, renderer: Renderer, example: Example) -> tuple[list[int], list[bool]]:
        return renderer.render_conversation(
            example.messages,
            num_images=len(example.images),
            tools=example.tools,
            template_kwargs=example.chat_template_kwargs,
        )
