"""Compares steps of one run with something on and off in turns, and takes what is counted where it is on. Pure.

Steps of two runs differ by more than what recording costs, even if both run at once: by the order in which the system
serves them, and by what else the machine does. Neighbouring steps of one run share most of that. In each pair of turns
chance says which comes first, so that a run that becomes faster or slower favours neither. What still differs inside of
a pair shows in processes that the switch does not reach: they are a control variate.
"""

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final, TypeVar

_Key = TypeVar("_Key")

_CERTAIN: Final = 2.5
"""Standard errors within which a mean is taken to be known."""
_MIN_VALUES: Final = 10
"""By fewer values, the standard error itself is hardly known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Steps in a row with it on or off."""

    is_on: bool
    step_s: float
    """Mean seconds of a step."""
    core_s: Mapping[str, float]
    """Mean processor time of a step by kind of process."""
    recorded_s: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """What of it recording itself counted, by kind of process and part (`account.Part`)."""

    @property
    def total_core_s(self) -> float:
        """Processor time of all processes."""
        return sum(self.core_s.values())

    @property
    def total_recorded_s(self) -> float:
        """What recording itself counted in all processes."""
        return sum(self.recorded_s.values())


class Turns:
    """Switches while a run goes on, and measures each turn once what came before it has had its effect."""

    def __init__(
        self,
        switch: Callable[[bool], None],
        read: Callable[[], Mapping[str, float]],
        read_recorded: Callable[[], Mapping[tuple[str, str], float]] = dict,
        *,
        num_pairs: int,
        num_steps: int,
        settle_s: float,
        seed: int = 0,
    ) -> None:
        """Begin with the next step.

        Args:
            switch: Switches it on or off.
            read: Returns the processor time that was used so far, by kind of process.
            read_recorded: Returns what recording itself counted of it so far, by kind of process and part.
            num_pairs: Turns on, and as many off.
            num_steps: Steps of a turn that are measured.
            settle_s: Seconds after a switch in which steps are not measured.
            seed: Which order of on and off.
        """
        chance = random.Random(seed)
        self._left = [is_on for _ in range(num_pairs) for is_on in chance.sample((True, False), 2)]
        self._switch = switch
        self._read = read
        self._read_recorded = read_recorded
        self._num_steps = num_steps
        self._settle_s = settle_s
        self._switched_s = math.nan
        self._began: tuple[float, Mapping[str, float], Mapping[tuple[str, str], float]] | None = None
        self._num_taken = 0
        self.measured: list[Turn] = []
        """In the order in which they were taken, pair by pair."""

    @property
    def is_over(self) -> bool:
        """Whether all turns are measured."""
        return not self._left

    def add_step(self, ended_s: float) -> None:
        """Count a step that ended at `ended_s`, on any clock."""
        if self.is_over:
            return
        if math.isnan(self._switched_s):
            self._begin_turn(ended_s)
        elif self._began is None:
            if ended_s - self._switched_s >= self._settle_s:
                self._began, self._num_taken = (ended_s, self._read(), self._read_recorded()), 0
        else:
            self._num_taken += 1
            if self._num_taken == self._num_steps:
                self._end_turn(ended_s, *self._began)

    def _begin_turn(self, now_s: float) -> None:
        self._switch(self._left[0])
        self._switched_s, self._began = now_s, None

    def _end_turn(
        self,
        ended_s: float,
        began_s: float,
        used_before: Mapping[str, float],
        recorded_before: Mapping[tuple[str, str], float],
    ) -> None:
        self.measured.append(
            Turn(
                is_on=self._left.pop(0),
                step_s=(ended_s - began_s) / self._num_steps,
                core_s=self._of_a_step(used_before, self._read()),
                recorded_s=self._of_a_step(recorded_before, self._read_recorded()),
            )
        )
        if self._left:
            self._begin_turn(ended_s)

    def _of_a_step(self, before: Mapping[_Key, float], after: Mapping[_Key, float]) -> dict[_Key, float]:
        return {key: (total - before.get(key, 0.0)) / self._num_steps for key, total in after.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean of differences between turns on and off."""

    mean: float
    error: float
    """Its standard error."""
    num: int
    """Differences of which it is the mean."""

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        """Estimate the mean of what `values` are a sample of; at least two."""
        error = statistics.stdev(values) / math.sqrt(len(values))
        return cls(mean=statistics.mean(values), error=error, num=len(values))

    def __add__(self, other: "Estimate") -> "Estimate":
        """Estimate the sum of two means whose errors are independent."""
        error = math.hypot(self.error, other.error)
        return Estimate(mean=self.mean + other.mean, error=error, num=min(self.num, other.num))

    def share_of(self, whole: float) -> "Estimate":
        """Return it as a share of `whole`."""
        return replace(self, mean=self.mean / whole, error=self.error / whole)

    def is_at_most(self, bar: float) -> bool | None:
        """Return whether the mean is at most `bar`; None if it cannot be told."""
        if self.num < _MIN_VALUES or abs(self.mean - bar) < _CERTAIN * self.error:
            return None
        return self.mean <= bar


def while_on(turns: Sequence[Turn], value: Callable[[Turn], float]) -> Estimate:
    """Estimate what `value` is in turns that are on."""
    return Estimate.of([value(turn) for turn in turns if turn.is_on])


def compare(
    turns: Sequence[Turn],
    value: Callable[[Turn], float],
    *,
    is_relative: bool,
    control: Callable[[Turn], float] | None = None,
) -> Estimate:
    """Estimate how much more `value` is in turns that are on than in those that are off, by pairs of neighbours.

    Args:
        turns: Two for each pair.
        value: What is compared.
        is_relative: Whether the difference is a share of the value in all turns that are off.
        control: What follows the same conditions as `value`, and is not changed by what is on. The estimate is that of
            a pair whose control is equal (a control variate: least squares over the pairs, at least three).
    """
    pairs = [sorted(pair, key=lambda turn: turn.is_on) for pair in list(pairwise(turns))[::2]]
    differences = [value(on) - value(off) for off, on in pairs]
    if control is None:
        found = Estimate.of(differences)
    else:
        found = _at_zero([control(on) - control(off) for off, on in pairs], differences)
    if not is_relative:
        return found
    return found.share_of(statistics.mean(value(off) for off, _ in pairs))


def _at_zero(x: Sequence[float], y: Sequence[float]) -> Estimate:
    """Estimate the mean of `y` where `x` is 0, if a straight line leads there; the error is the intercept's."""
    if len({*x}) == 1:
        return Estimate.of(y)
    line, num, mean_x = statistics.linear_regression(x, y), len(x), statistics.mean(x)
    variance = sum((b - line.intercept - line.slope * a) ** 2 for a, b in zip(x, y, strict=True)) / (num - 2)
    spread = sum((a - mean_x) ** 2 for a in x)
    return Estimate(mean=line.intercept, error=math.sqrt(variance * (1 / num + mean_x**2 / spread)), num=num)
