"""What keeping episodes costs: processor time and bytes of a token, for groups as long as those of Geometry3K.

    python bench/bench_episodes.py                         # 32 groups of 8 samples of 1,000 tokens
    python bench/bench_episodes.py --tokens 4000

The trainer's thread that describes and writes groups gets a batch as the training loop gives it, with
`episodes.keep = "all"`, and is timed until the batch is in its files. Processor time is this process's; the loop itself
only hands the batch over.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from penstock.model.chat.chat_template import Renderer
from penstock.records import Group, GroupId, Message, Sample, TextPart, TokenSequence, Turn, Verdict, VersionSpan
from services.trainer.backend.base import StepTokens
from services.trainer.batching.sequences import TrainGroup
from services.trainer.data.rows.example import Example
from services.trainer.position import Position
from services.trainer.telemetry.episodes.config import EpisodesConfig
from services.trainer.telemetry.episodes.log import FOLDER, EpisodeLog, TrainedGroup

MODEL = Path(__file__).parents[1] / "models" / "tiny-qwen3-vl"
PROMPT_TOKENS = 400
_TEXT = Path(__file__).parents[1] / "README.md"


class _Rows:
    """One row, without images."""

    def row_at(self, position: int) -> tuple[str, int]:
        return "", position

    def __getitem__(self, position: int) -> Example:
        messages = (Message(role="user", parts=(TextPart(text="Find x."),)),)
        return Example(messages=messages, images=(), golds=("3",), profile="math", environment="single_turn")


def make_group(index: int, text: np.ndarray, *, samples: int, tokens: int, rng: np.random.Generator) -> TrainedGroup:
    """Return a group whose tokens are part of a text's."""
    first = int(rng.integers(len(text)))
    ids = np.resize(np.roll(text, -first), PROMPT_TOKENS + tokens).astype(np.int32)
    mask = np.arange(len(ids)) >= PROMPT_TOKENS
    logprobs = np.where(mask, -rng.exponential(size=len(ids)), 0).astype(np.float32)
    sequence = TokenSequence(
        token_ids=ids,
        loss_mask=mask,
        logprobs=logprobs,
        version_spans=(VersionSpan(num_tokens=tokens, policy_version=1),),
        images=(),
        num_prompt_tokens=PROMPT_TOKENS,
        num_last_turn_tokens=tokens,
    )
    sample = Sample(
        sequences=(sequence,),
        reward=1.0,
        finish_reason="stop",
        verdict=Verdict(score=1.0, status="OK", extracted="3", method="exact"),
        turns=(Turn(replica_id="e", num_prompt_tokens=PROMPT_TOKENS, num_cached_tokens=0, num_output_tokens=tokens),),
        text="x" * 4 * tokens,
    )
    played = Group(
        id=GroupId(run_id="run", index=index, attempt=0, trainer_epoch="e"),
        num_samples=samples,
        samples=(sample,) * samples,
        worker_id="w",
    )
    nothing: Any = tuple(() for _ in range(samples))
    ready = TrainGroup(index=index, attempt=0, oldest_version=1, samples=nothing, rewards=(1.0,) * samples)
    return TrainedGroup(played=played, ready=ready, images={})


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1000, help="the policy's own tokens of a sample")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    template = Renderer.load(MODEL)
    text = np.array(template.render_text(_TEXT.read_text()))
    batch = [
        make_group(index, text, samples=options.samples, tokens=options.tokens, rng=rng)
        for index in range(options.groups)
    ]
    num = options.groups * options.samples * options.tokens
    column = np.ones(num, dtype=np.float32)
    tokens = StepTokens(
        sample_N=np.repeat(np.arange(options.groups * options.samples), options.tokens),
        logprobs_N=-column,
        ratio_N=column,
        correction_N=column,
        advantages_N=column,
        trained_N=column > 0,
        entropy_N=column,
    )
    with tempfile.TemporaryDirectory() as scratch:
        rows: Any = _Rows()
        names = template.token_texts().names_of
        position = Position(num_steps=options.steps, step=0, version=1)
        log = EpisodeLog(Path(scratch), EpisodesConfig(keep="all"), position, dataset=rows, names=names)
        processor, wall, handed = time.process_time(), time.perf_counter(), 0.0
        for step in range(1, options.steps + 1):
            began = time.perf_counter()
            log.keep_trained(step, 1, batch, tokens)
            handed += time.perf_counter() - began
        log.close()
        processor, wall = time.process_time() - processor, time.perf_counter() - wall
        size = sum(path.stat().st_size for path in (Path(scratch) / FOLDER).rglob("*.jsonl"))
    steps = options.steps
    sys.stdout.write(
        f"{num:,} tokens of the policy's own a step, {PROMPT_TOKENS} of each prompt\n"
        f"written {size / steps / 2**20:.1f} MiB a step, {size / steps / num:.0f} bytes a token; "
        f"{processor / steps:.3f} s of processor time a step, {1e6 * processor / steps / num:.2f} us a token; "
        f"{wall / steps:.3f} s wall; the loop's own share {1e3 * handed / steps:.2f} ms; dropped {log.num_dropped}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
