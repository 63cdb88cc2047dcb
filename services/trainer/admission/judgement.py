"""Says whether a group was judged. Pure, as the filters are.

A worker fails a whole group if one of its samples needs gold answers that cannot be read. So a verdict of GOLD_INVALID
says only that the sample ended before its environment gave a reward: by itself, or because its environment never
answered.
"""

from collections import Counter

from penstock.records import Group, Sample
from penstock.verdict_status import Status


def is_judged(group: Group) -> bool:
    """Return whether a reward says what a sample's text is worth, or rewards differ."""
    rewards = {sample.reward for sample in group.samples if sample.reward is not None}
    return len(rewards) > 1 or any(map(_is_sound, group.samples))


def why_unjudged(group: Group) -> str:
    """Return why a group teaches nothing, if it was not judged and one of its samples failed; else nothing.

    A group whose samples only ended too early to be judged is no failure. Stuck samples fail it only if they are more
    than half of its samples: an environment that is slow now and then must not end a run.
    """
    if is_judged(group):
        return ""
    failed = list(filter(_is_stuck, group.samples))
    if len(failed) <= len(group.samples) / 2:
        failed = list(filter(_has_failed, group.samples))
    if not failed:
        return ""
    ((why, _),) = Counter(map(_describe, failed)).most_common(1)
    return f"no sample was judged; most often: {why}"


def _is_sound(sample: Sample) -> bool:
    """Return whether a sample's reward is its environment's, or the verdict on a text that it has answered."""
    return sample.reward is not None and (sample.verdict is None or not sample.is_cut_short)


def _is_stuck(sample: Sample) -> bool:
    """Return whether its environment was asked and never answered."""
    return sample.is_cut_short and bool(sample.ended_by)


def _has_failed(sample: Sample) -> bool:
    """Return whether a sample has no reward for another reason than that it ended too early."""
    lacks_golds = sample.verdict is not None and sample.verdict.status == Status.GOLD_INVALID
    return sample.reward is None and (bool(sample.error) or not (sample.is_cut_short or lacks_golds))


def _describe(sample: Sample) -> str:
    """Return why a sample failed, in words that other samples share, so that they can be counted."""
    if sample.error or _is_stuck(sample):
        return sample.error or sample.ended_by
    status = "missing" if sample.verdict is None else sample.verdict.status
    return (
        f"it ended as {sample.finish_reason}, and its verdict is {status}; see the reward service, and the row's golds"
    )
