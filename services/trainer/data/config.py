"""Settings of the data: section `[data]` of a recipe."""

from pathlib import Path
from typing import Literal

import pydantic

from penstock.config import Config
from penstock.errors import ConfigError


class DataConfig(Config):
    """Where the prompts come from."""

    path: str = ""
    """Parquet file, in the schema of hiyouga/geometry3k or a similar one. Empty: the built-in data set."""
    kinds: tuple[Literal["x", "y", "length", "distance"], ...] = pydantic.Field(
        default=("x", "y", "length"), min_length=1
    )
    """Kinds of problem in the built-in data set of 10,000 pictures, which is used when path is empty."""
    shuffle: bool = True
    """Shuffle the rows anew for each epoch; otherwise keep the order of the file."""
    images_column: str | tuple[str, ...] = ""
    """Column with each row's images, or a list of columns. Empty: `images` or `image`, if there is one. An empty list:
    none, the prompts are text."""
    problem_column: str = ""
    """Column with the text, one `<image>` per image, or with a list of messages. A dot leads into a struct. Empty:
    `problem` or `prompt`, else `question`, `query`, `input` or `messages`."""
    answer_column: str = ""
    """Column with the correct answer, or a list of those that count. A dot leads into a struct:
    `reward_model.ground_truth`. Empty: `answer`, `reward_model` or `reward_spec`, else `label`, `ground_truth` or
    `target`."""
    images_first: bool = False
    """Put the images of a row whose text has no `<image>` before its first user message's text. Otherwise such a row is
    refused. The number of these rows is logged."""
    prompt_suffix: str = ""
    """Appended to the last user message, for example an instruction on how to give the answer."""
    system_prompt: str = ""
    """System message put before each prompt; empty means none. Rows with a system message of their own are refused."""
    profile: str = "geo3k"
    """Reward profile that judges the answers."""
    environment: str = "single_turn"
    """Environment that plays the prompts."""

    def require_file(self) -> None:
        """Check that the file exists, if one is configured; cheap enough to do before anything else starts.

        Raises:
            ConfigError: there is no such file.
        """
        if self.path and not Path(self.path).is_file():
            raise ConfigError(
                f"data.path = {self.path!r}: there is no such file; give a .parquet file, or leave it out for the "
                "built-in data set"
            )
