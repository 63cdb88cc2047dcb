"""What keeping episodes costs: processor time and bytes of a step and of a token.

    python bench/bench_episodes.py                                         # 32 groups of 8 samples of 1,000 tokens
    python bench/bench_episodes.py --tokens 100 1500                       # as long as answers to Geometry3K
    python bench/bench_episodes.py --samples 4 --tokens 8 --prompt-tokens 27 --steps 100    # steps of the demo

The trainer's thread that describes and writes groups gets batches as the training loop gives them, with
`episodes.keep = "all"`, and is timed until they are in its files. Every group shows a picture. Processor time is this
process's; the loop itself only hands the batches over. A first batch, for which the vocabulary is named, is not timed.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.bus.image_store import hash_of
from penstock.model.chat.chat_template import Renderer
from penstock.records import Group, GroupId, Message, Sample, TextPart, TokenSequence, Turn, Verdict, VersionSpan
from services.trainer.backend.base import StepTokens
from services.trainer.batching.sequences import TrainGroup
from services.trainer.data.geometry import GeometryDataset
from services.trainer.data.rows.example import Example
from services.trainer.position import Position
from services.trainer.telemetry.episodes.config import EpisodesConfig
from services.trainer.telemetry.episodes.log import FOLDER, EpisodeLog, TrainedGroup

MODEL = Path(__file__).parents[1] / "models" / "tiny-qwen3-vl"
_TEXT = Path(__file__).parents[1] / "README.md"


class _Rows:
    """Rows with a picture each."""

    def __init__(self, num_rows: int) -> None:
        self._pictures = [row["images"][0]["bytes"] for row in GeometryDataset(num_rows)]

    def row_at(self, position: int) -> tuple[str, int]:
        return "", position

    def __getitem__(self, position: int) -> Example:
        messages = (Message(role="user", parts=(TextPart(text="Find x."),)),)
        images = (self._pictures[position],)
        return Example(messages=messages, images=images, golds=("3",), profile="math", environment="single_turn")


def make_group(
    index: int, text: np.ndarray, picture: bytes, *, prompt_tokens: int, lengths: Sequence[int]
) -> TrainedGroup:
    """Return a group with a sample of each length, whose tokens are part of a text's."""
    prompt = np.resize(np.roll(text, -index), prompt_tokens)
    samples = tuple(_make_sample(prompt, np.resize(text, length), hash_of(picture)) for length in lengths)
    played = Group(
        id=GroupId(run_id="run", index=index, attempt=0, trainer_epoch="e"),
        num_samples=len(samples),
        samples=samples,
        worker_id="w",
    )
    nothing: Any = tuple(() for _ in samples)
    ready = TrainGroup(index=index, attempt=0, oldest_version=1, samples=nothing, rewards=(1.0,) * len(samples))
    return TrainedGroup(played=played, ready=ready, images={hash_of(picture): picture})


def _make_sample(prompt: np.ndarray, answer: np.ndarray, sha256: str) -> Sample:
    ids = np.concatenate([prompt, answer]).astype(np.int32)
    mask = np.arange(len(ids)) >= len(prompt)
    rng = np.random.default_rng(len(ids))
    logprobs = np.where(mask, -rng.exponential(size=len(ids)), 0).astype(np.float32)
    sequence = TokenSequence(
        token_ids=ids,
        loss_mask=mask,
        logprobs=logprobs,
        version_spans=(VersionSpan(num_tokens=len(answer), policy_version=1),),
        images=(sha256,),
        num_prompt_tokens=len(prompt),
        num_last_turn_tokens=len(answer),
    )
    turn = Turn(replica_id="e", num_prompt_tokens=len(prompt), num_cached_tokens=0, num_output_tokens=len(answer))
    return Sample(
        sequences=(sequence,),
        reward=1.0,
        finish_reason="stop",
        verdict=Verdict(score=1.0, status="OK", extracted="3", method="exact"),
        turns=(turn,),
        text="x" * 4 * len(answer),
    )


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[1000],
        help="the policy's own of a sample: all have as many, or between the first and the last of two numbers",
    )
    parser.add_argument("--prompt-tokens", type=int, default=400)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    template = Renderer.load(MODEL)
    text = np.array(template.render_text(_TEXT.read_text()))
    rows: Any = _Rows(options.groups)
    lengths = np.random.default_rng(0).integers(
        options.tokens[0], options.tokens[-1] + 1, size=(options.groups, options.samples)
    )
    batch = [
        make_group(
            index, text, rows[index].images[0], prompt_tokens=options.prompt_tokens, lengths=lengths[index].tolist()
        )
        for index in range(options.groups)
    ]
    num = int(lengths.sum())
    column = np.ones(num, dtype=np.float32)
    tokens = StepTokens(
        sample_N=np.repeat(np.arange(lengths.size), lengths.ravel()),
        logprobs_N=-column,
        ratio_N=column,
        correction_N=column,
        advantages_N=column,
        trained_N=column > 0,
        entropy_N=column,
    )
    with tempfile.TemporaryDirectory() as scratch:
        names = template.token_texts().names_of
        position = Position(num_steps=options.steps, step=0, version=1)

        def open_log(name: str) -> EpisodeLog:
            return EpisodeLog(Path(scratch, name), EpisodesConfig(keep="all"), position, dataset=rows, names=names)

        log = open_log("untimed")
        log.keep_trained(1, 1, batch, tokens)
        log.close()
        log = open_log("timed")
        processor, wall, handed = time.process_time(), time.perf_counter(), 0.0
        for step in range(1, options.steps + 1):
            began = time.perf_counter()
            log.keep_trained(step, 1, batch, tokens)
            handed += time.perf_counter() - began
        log.close()
        processor, wall = time.process_time() - processor, time.perf_counter() - wall
        size = sum(path.stat().st_size for path in Path(scratch, "timed", FOLDER).rglob("*.jsonl"))
    steps = options.steps
    sys.stdout.write(
        f"{num:,} tokens of the policy's own a step, {options.prompt_tokens} of each prompt\n"
        f"written {size / steps / 1e6:.2f} MB a step, {size / steps / num:.0f} bytes a token; "
        f"{1e3 * processor / steps:.1f} ms of processor time a step, {1e6 * processor / steps / num:.2f} us a token; "
        f"{wall / steps:.3f} s wall; the loop's own share {1e3 * handed / steps:.2f} ms; dropped {log.num_dropped}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
