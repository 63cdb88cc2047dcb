"""Prompts as environments and agents see them."""

import hashlib

from penstock.environments import Task
from penstock.records import Prompt
from services.rollout.worker.episodes.clock import EpisodeClock
from services.rollout.worker.episodes.grading import Grading
from services.rollout.worker.group_images import GroupImages


def make_task(prompt: Prompt, item_id: str, images: GroupImages, grading: Grading, clock: EpisodeClock) -> Task:
    """Make the task of sample `item_id`; `grading` judges its answers, `clock` is its time."""
    seed_key = prompt.seed_key or prompt.id.group
    return Task(
        id=item_id,
        seed=int.from_bytes(hashlib.sha256(seed_key.encode()).digest()[:8], "little"),
        messages=prompt.messages,
        images=images.prompt,
        golds=prompt.golds,
        profile=prompt.profile,
        tools=prompt.tools,
        extra=prompt.extra,
        max_turns=prompt.limits.max_turns,
        remaining_s=lambda: clock.remaining_s,
        grade=grading.grade,
    )
