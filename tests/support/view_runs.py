"""Folders of runs as the trainer leaves them, made without one: for tests of what shows them."""

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from services.trainer.telemetry.episodes.files import DescribedGroup, EpisodeFiles

SHA = "ab" * 32


def png(width: int = 48, height: int = 48) -> bytes:
    """A picture of one colour."""
    raw = b"".join(b"\0" + b"\xd5\x5e\x00" * width for _ in range(height))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08\x02\0\0\0"
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b"")


def step_row(step: int, **changes: Any) -> dict[str, Any]:
    """A row of metrics.jsonl."""
    return {
        "step": step,
        "num_steps": 200,
        "policy_version": step,
        "groups": list(range(4 * step, 4 * step + 4)),
        "reward_mean": 0.3 + 0.004 * step,
        "dlogp_mean_current": 1e-6,
        "staleness_mean": 0.5,
        "staleness_max": 1,
        "max_staleness": 1,
        "token_lag_max": 1,
        "num_tokens_lag_0": 600 + step,
        "num_tokens_lag_1": 400,
        "grad_norm": 1.0,
        "step_s": 2.0,
        "train_s": 1.2,
        "wait_s": 0.6,
        "trainer_idle_fraction": 0.4,
        "num_samples": 16,
        "push_s": 0.2,
        "push_pause_s": 0.1,
        "push_pause_max_s": 0.1,
        "push_pause_max_replica": "engine-1",
        "push_bytes": 2**20,
        "push_replicas": 2,
        "push_failed_replicas": 0,
        "num_replicas": 2,
        "trainer_start": 1,
        "elapsed_s": 2.0 * step,
        "time": "2026-01-01T00:00:00.000+00:00",
        **changes,
    }


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Append to metrics.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def column(values: Any, dtype: str = "<f4") -> str:
    """Numbers of a sequence's tokens, as descriptions of groups have them."""
    return base64.b64encode(np.asarray(values).astype(dtype).tobytes()).decode()


def add_group(
    files: EpisodeFiles,
    *,
    step: int = 1,
    index: int = 0,
    outcome: str = "trained",
    reason: str = "best",
    rewards: tuple[float | None, ...] = (1.0, 0.0),
    text: str = "The answer is 3.",
    prompt: str = "How many corners has the figure?",
    num_tokens: int = 6,
    dlogp: float = 1e-6,
    source: str = "",
    num_answered: int = 0,
    placeholders: tuple[int, ...] = (),
) -> None:
    """Add a group of samples whose tokens are the words of a text, again and again; the environment answers
    `num_answered` of them in the middle, of which `placeholders` stand for a picture each."""
    images = files.add_images({SHA: png()})
    words = [f" {word}" for word in text.split()]
    texts = [words[place % len(words)] for place in range(num_tokens)]

    own = np.ones(num_tokens, dtype=bool)
    own[num_tokens // 3 : num_tokens // 3 + num_answered] = False
    num_own = num_tokens - num_answered
    differences = np.full(num_own, dlogp / 2)
    differences[num_own // 2] = dlogp
    started = 1_700_000_000.0 + 2 * step
    samples = [
        {
            "reward": reward,
            "advantage": None if outcome != "trained" else 0.5 - number,
            "metrics": {},
            "verdict": {"score": reward or 0.0, "status": "OK", "extracted": "3", "method": "exact"},
            "finish_reason": "stop",
            "error": "",
            "started_at": started,
            "elapsed_s": 1.0 + number / 4,
            "turns": [
                {
                    "replica_id": f"engine-{number % 2}",
                    "num_prompt_tokens": 9,
                    "num_cached_tokens": 0,
                    "num_output_tokens": num_tokens,
                    "started_at": started,
                    "waited_s": 0.1,
                    "generated_s": 0.9,
                    "tools": [],
                    "environment_s": 0.02,
                    "reward": None,
                    "metrics": {},
                }
            ],
            "text": text,
            "sequences": [
                {
                    "token_ids": column(range(num_tokens), "<i4"),
                    "texts": texts,
                    "own": column(own, "u1"),
                    "versions": [[num_own, step]],
                    "engine_logprobs": column(np.full(num_own, -0.5), "<f4"),
                    "images": [images[SHA]] * (1 + len(placeholders)),
                    "placeholders": [*placeholders],
                    **(
                        {
                            "logprobs": column(-0.5 + differences, "<f4"),
                            "ratio": column(np.ones(num_own), "<f4"),
                            "correction": column(np.ones(num_own), "<f4"),
                            "advantages": column(np.full(num_own, 0.5 - number), "<f4"),
                            "trained": column(np.ones(num_own), "u1"),
                        }
                        if outcome == "trained"
                        else {}
                    ),
                }
            ],
        }
        for number, reward in enumerate(rewards)
    ]
    common = {
        "group": f"run/{index}",
        "index": index,
        "attempt": 0,
        "outcome": outcome,
        "reason": reason,
        "error": "",
        "step": step,
        "version": step + 1,
        "time": "2026-01-01T00:00:00.000+00:00",
        "source": source,
        "row": index % 7,
        "environment": "single_turn",
        "worker": "w",
    }
    whole = common | {
        "messages": [{"role": "user", "content": f"<image-0>{prompt}"}],
        "golds": ["3"],
        "images": [images[SHA]],
        "prompt": {"token_ids": column([1, 2], "<i4"), "texts": ["<|im_start|>", "user"]},
        "samples": samples,
    }
    short = common | {
        "golds": ["3"],
        "num_images": 1,
        "prompt": prompt,
        "texts": [text if len(text) <= 400 else text[:400] + "…" for _ in rewards],
        "rewards": list(rewards),
        "advantages": [sample["advantage"] for sample in samples],
        "finish": ["stop" for _ in rewards],
        "statuses": ["OK" for _ in rewards],
        "num_tokens": [num_tokens for _ in rewards],
        "num_turns": [1 for _ in rewards],
        "versions": [step, step],
        "dlogp_max": dlogp if outcome == "trained" else None,
        "spans": [[sample["started_at"], sample["elapsed_s"], [f"engine-{n % 2}"]] for n, sample in enumerate(samples)],
    }
    files.add(step, [DescribedGroup.of(whole, short, image_files=images.values())])


def make_run(folder: Path, *, num_steps: int = 30, **recipe: Any) -> Path:
    """A run of some steps with a group each, traces and an evaluation, which a launcher has started."""
    write_rows(folder, [step_row(step) for step in range(1, num_steps + 1)])
    settings = {"num_steps": 200, **recipe}
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    (folder / "config.toml").write_text('[run]\nname = "run"\n[trainer]\n' + "\n".join(lines) + "\n")
    (folder / ".lock").touch()
    files = EpisodeFiles(folder / "episodes", last_step=num_steps, max_bytes=1e12)
    trace = folder / "trace" / "trainer.jsonl"
    trace.parent.mkdir(exist_ok=True)
    with trace.open("w") as file:
        for step in range(1, num_steps + 1):
            add_group(files, step=step, index=4 * step, dlogp=1e-6 * step)
            began = 1_700_000_000.0 + 2 * step
            spans = [["wait_s", began, 0.6], ["train_s", began + 0.6, 1.2], ["push", began + 1.8, 0.2]]
            file.write(json.dumps({"step": step, "spans": spans}) + "\n")
    score = {"value": 0.5, "standard_error": 0.02}
    estimates = {"score": score, "pass_at": {"1": score, "4": score | {"value": 0.7}}, "majority_at": {"4": score}}
    found = {**estimates, "num_prompts": 100, "truncated_fraction": 0.0}
    row = {"step": num_steps // 2, "policy_version": num_steps // 2, "elapsed_s": 3.0, "sets": {"held_out": found}}
    (folder / "evaluations.jsonl").write_text(json.dumps(row) + "\n")
    return folder


def add_spans(folder: Path, *, num_steps: int = 30) -> None:
    """Add what an engine and the router did for the first sample of each step's group of `make_run`, and a push."""
    spans: list[Any] = []
    routed: list[Any] = []
    for step in range(1, num_steps + 1):
        group, began = f"run/{4 * step}/0/abc", 1_700_000_000.0 + 2 * step
        call = {"group": group, "request": f"{group}/0/0/ffff", "first_token_s": 0.3, "num_tokens": 6, "version": step}
        spans += [
            ["call", began + 0.2, 1.2, call],
            ["paused", began + 1.8, 0.1, {"version": step + 1, "then": "READY"}],
            *(
                ["push.received", began + after, 0.05, {"stage": stage, "version": step + 1, "push": f"v{step + 1}"}]
                for stage, after in (("prepare", 1.75), ("pause", 1.8), ("receive", 1.85))
            ),
        ]
        about = {key: call[key] for key in ("group", "request")}
        routed += [["route.attempt", began + 0.2, 1.2, about | {"replica": "engine-5", "outcome": "complete"}]]
    batch = {"host": "a", "pid": 1, "start": "s", "number": 1, "dropped": 0, "sent": began}
    rows = [
        {"sequence": 1, "stored": began, "batch": batch | {"process": "rollout-0", "spans": spans}},
        {"sequence": 2, "stored": began, "batch": batch | {"process": "router", "spans": routed}},
    ]
    (folder / "trace" / "spans-1700000000000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    started = [["process.starting", 1_700_000_000.0, 1.0, {"service": name, "start": 1}] for name in ("rollout-0", "x")]
    ended = ["process", 1_700_000_000.0, 9.0, {"service": "x", "start": 1, "exit_code": 1, "was_stopped": False}]
    row = {"sequence": 0, "stored": None, "batch": batch | {"process": "launcher", "spans": [*started, ended]}}
    (folder / "trace" / "launcher-1700000000000.jsonl").write_text(json.dumps(row) + "\n")


def add_end(folder: Path, *, num_steps: int = 30) -> None:
    """Add to `add_spans` what came after the last step: its evaluation, of 20 s, and a process's end."""
    began = 1_700_000_000.0 + 2 * num_steps + 2.5
    batch = {"host": "a", "pid": 1, "start": "s", "number": 2, "dropped": 0, "sent": began + 20.0}
    played = ["evaluation", began, 20.0, {"step": num_steps, "version": num_steps + 1}]
    row = {"sequence": 3, "stored": began + 20.0, "batch": batch | {"process": "trainer", "spans": [played]}}
    with (folder / "trace" / "spans-1700000000000.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    ended = ["process", 1_700_000_000.0, 2 * num_steps + 23.0, {"service": "rollout-0", "start": 1, "exit_code": 0}]
    row = {"sequence": 0, "stored": None, "batch": batch | {"process": "launcher", "spans": [ended]}}
    with (folder / "trace" / "launcher-1700000000000.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
