"""What `make bench-async` compares Penstock with, on cases small enough to be computed by hand."""

import asyncio
import itertools
from dataclasses import dataclass

import pytest

from bench.async_loop import virtual_time
from bench.async_loop.bench_async import Result, worst_of_best
from bench.async_loop.measured_loop import Measured
from bench.async_loop.peer_loops import one_step_off, synchronous
from bench.async_loop.perfect_loop import Push, step_ends
from bench.async_loop.routed_loop import run_routed
from bench.async_loop.step_path import StepPath
from bench.async_loop.workload import Scenario, Workload, scenario


@dataclass(frozen=True, kw_only=True)
class Given(Workload):
    """Groups of one sample, whose lengths are given; a token takes a second, an optimizer step too."""

    lengths: tuple[int, ...]
    seed: int = 0
    samples_per_group: int = 1
    median_tokens: float = 0.0
    sigma: float = 0.0
    max_tokens: int = 0
    token_s: float = 1.0
    train_token_s: float = 0.0
    train_fixed_s: float = 1.0

    def num_tokens(self, index: int) -> tuple[int, ...]:
        """The same lengths again and again."""
        return (self.lengths[index % len(self.lengths)],)


def _given(*lengths: int, slots: int, groups_per_step: int = 1) -> Scenario:
    return Scenario(
        replicas=1, slots_per_replica=slots, groups_per_step=groups_per_step, workload=Given(lengths=lengths)
    )


def test_without_staleness_generating_and_training_take_turns() -> None:
    """Two seconds of rollout and one of training for each step."""
    assert step_ends(_given(2, slots=1), max_staleness=0, num_steps=3) == [3.0, 6.0, 9.0]
    assert synchronous(_given(2, slots=1), num_steps=3) == [3.0, 6.0, 9.0]


def test_one_version_of_staleness_hides_training_behind_rollout() -> None:
    """The slot never idles, so every step but the first takes what its group takes."""
    assert step_ends(_given(2, slots=1), max_staleness=1, num_steps=4) == [3.0, 5.0, 7.0, 9.0]


@pytest.mark.parametrize(
    ("max_staleness", "ends"),
    [
        pytest.param(1, [2.0, 5.0, 6.0], id="the second step waits for the long group, which is due"),
        pytest.param(2, [2.0, 3.0, 5.0], id="another group goes first, and the third step waits"),
        pytest.param(3, [2.0, 3.0, 4.0], id="nobody waits"),
    ],
)
def test_the_bound_decides_who_waits_for_a_long_sample(max_staleness: int, ends: list[float]) -> None:
    """Two slots, of which a group of four seconds holds one."""
    long_second = _given(1, 4, 1, 1, 1, 1, slots=2)
    assert step_ends(long_second, max_staleness=max_staleness, num_steps=3) == ends


def test_streaming_computes_what_is_there_while_it_waits_for_the_rest() -> None:
    """Groups of one and three seconds, which take as long to train, and a second for the update."""
    pool = Scenario(
        replicas=1, slots_per_replica=2, groups_per_step=2, workload=Given(lengths=(1, 3), train_token_s=1.0)
    )
    assert step_ends(pool, max_staleness=0, num_steps=1) == [7.0]
    assert step_ends(pool, max_staleness=0, num_steps=1, streams=False) == [8.0]


def test_peers_wait_for_the_longest_sample_of_a_batch() -> None:
    """Batches of 3 and 2 seconds; one step off, the next is generated while one is trained."""
    pool = _given(1, 3, 2, 2, slots=2, groups_per_step=2)
    assert synchronous(pool, num_steps=2) == [4.0, 7.0]
    assert one_step_off(pool, num_steps=3) == [4.0, 6.0, 9.0]


def test_no_bound_lets_a_run_be_faster_than_its_slots_and_its_trainer() -> None:
    """Ideal is a bound from above for drawn durations, and more staleness never costs."""
    pool = scenario(4, slots=4, sample_s=2.0, train_share=0.8)
    ends = {bound: step_ends(pool, max_staleness=bound, num_steps=60)[-1] for bound in (0, 1, 2, 4, 16)}
    batches = range(60 * pool.groups_per_step)
    assert list(ends.values()) == sorted(ends.values(), reverse=True)
    whole = {bound: step_ends(pool, max_staleness=bound, num_steps=60, streams=False)[-1] for bound in (0, 1, 4)}
    assert whole[0] == pytest.approx(synchronous(pool, num_steps=60)[-1])
    assert all(ends[bound] < whole[bound] for bound in (0, 1, 4))
    assert ends[16] >= pool.train_s(batches)
    assert ends[16] >= 0.9 * pool.rollout_s(batches)  # which groups are trained by then differs a little


def test_groups_begin_when_a_slot_has_the_weights() -> None:
    """Two seconds of rollout and one of training: a push of one second is added, or one of two until the first slot."""
    one, two = _given(2, slots=1), _given(2, slots=2)
    assert step_ends(one, max_staleness=0, num_steps=3, push=Push(total_s=1.0)) == [3.0, 7.0, 11.0]
    assert step_ends(two, max_staleness=0, num_steps=2, push=Push(total_s=2.0)) == [3.0, 8.0]
    assert step_ends(two, max_staleness=0, num_steps=2, push=Push(total_s=2.0, rolls=True)) == [3.0, 7.0]


def test_staleness_hides_a_push_as_long_as_there_is_slack() -> None:
    """With one version, the slot has a second while the trainer computes; half a second more costs half a second."""
    ends = [step_ends(_given(2, slots=1), max_staleness=1, num_steps=4, push=Push(total_s=s)) for s in (0.0, 1.0, 1.5)]
    assert ends == [[3.0, 5.0, 7.0, 9.0], [3.0, 5.0, 7.0, 9.0], [3.0, 5.0, 7.5, 9.5]]


@pytest.mark.parametrize("push_s", [0.0, 0.5])
@pytest.mark.parametrize("group_s", [1, 2, 4])
@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4])
def test_a_slow_push_costs_what_the_bound_leaves_no_room_for(max_staleness: int, group_s: int, push_s: float) -> None:
    """A group is due `max_staleness` steps after the one that it was admitted for (ADR 11); computing takes a second.

    With a bound of 1, half a step of push costs a quarter of each step even if groups are no longer than a step.
    """
    many_slots = _given(group_s, slots=20, groups_per_step=2)
    num_steps = 4 * (max_staleness + 1)
    ends = step_ends(many_slots, max_staleness=max_staleness, num_steps=2 * num_steps, push=Push(total_s=push_s))
    step_s = (ends[-1] - ends[num_steps - 1]) / num_steps
    assert step_s == pytest.approx(max(1.0, (push_s + group_s + 1.0) / (max_staleness + 1)))


def test_the_next_step_waits_for_a_push_that_is_longer_than_it() -> None:
    """At most one push is under way."""
    ends = step_ends(_given(1, slots=4), max_staleness=3, num_steps=12, push=Push(total_s=5.0))
    assert [later - earlier for earlier, later in itertools.pairwise(ends[6:])] == [5.0] * 5


def test_with_one_replica_placement_costs_nothing() -> None:
    """The real router and the real rule for chunks then give what the simulation without them does."""
    routed = run_routed(_given(2, slots=1), max_staleness=1, num_steps=4, pass_tokens=1)
    assert routed.ends == pytest.approx([3.0, 5.0, 7.0, 9.0])
    assert routed.prefill_ratio == 1.0


@pytest.mark.parametrize(
    ("replicas", "slots", "max_staleness", "num_steps", "most_prefills"),
    [
        (8, 8, 0, 20, 1.0),
        (8, 8, 1, 20, 1.15),
        (8, 8, 2, 20, 1.35),
        pytest.param(8, 8, 4, 30, 2.15, marks=pytest.mark.slow),
        (2, 32, 1, 20, 1.02),
    ],
)
def test_placement_and_chunks_cost_less_than_five_percent(
    replicas: int, slots: int, max_staleness: int, num_steps: int, most_prefills: float
) -> None:
    """Calls hardly wait beside free slots, and groups hardly wait for the trainer; yet a group's samples are not spread
    over replicas, each of which would compute their prompt: the more groups are played at once, the more a full replica
    loses samples of its groups to a free slot elsewhere."""
    shares, prefills = [], []
    for seed in (0, 1):
        pool = scenario(replicas, slots=slots, sample_s=1.5, train_share=0.8, seed=seed)
        best = step_ends(pool, max_staleness=max_staleness, num_steps=num_steps)
        routed = run_routed(pool, max_staleness=max_staleness, num_steps=num_steps, pass_tokens=8192)
        shares.append((best[-1] - best[4]) / (routed.ends[-1] - routed.ends[4]))
        prefills.append(routed.prefill_ratio)
    assert sum(shares) / len(shares) > 0.95
    assert sum(prefills) / len(prefills) <= most_prefills


def _measured(*, max_staleness: int, seed: int, of_best: float) -> Result:
    """A run whose best is two steps per second."""
    run = Measured(ends=[], cpu_s={}, push_s=0.0, pause_s=0.0, prefill_ratio=1.0, stale_groups=0)
    return Result(
        max_staleness=max_staleness,
        seed=seed,
        num_steps=4,
        measured=2.0 * of_best,
        best=2.0,
        routed=[2.0],
        not_streamed=2.0,
        ideal=2.0,
        synchronous=2.0,
        one_step_off=2.0,
        run=run,
        path=StepPath(delivered_s=None, pushed_s=None, begun_s=None),
        span_s=2.0,
        num_groups=4,
    )


def test_the_bar_holds_the_mean_of_a_rows_seeds() -> None:
    """A row whose runs differ by chance is not failed by the slowest, and does not hide behind another row."""
    of_four = [_measured(max_staleness=4, seed=seed, of_best=share) for seed, share in enumerate((0.93, 0.99))]
    of_one = [_measured(max_staleness=1, seed=seed, of_best=0.98) for seed in (0, 1)]
    assert worst_of_best([*of_four, *of_one]) == pytest.approx(0.96)


def test_virtual_time_says_when_nothing_can_happen_any_more() -> None:
    """A simulation that waits for itself fails instead of standing still."""
    with pytest.raises(RuntimeError, match="no timer"):
        virtual_time.run(asyncio.Event().wait())
