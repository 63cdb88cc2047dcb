"""Learning-rate schedules: the factor on the learning rate, as a pure function of the update's number.

Every schedule rises linearly to 1 over the warm-up and never falls below `min_ratio` after it. From the end of the
warm-up on, the values are those of transformers' schedulers of the same name.
"""

import functools
import math

from services.trainer.config import OptimizerConfig, ScheduleConfig


def rate_factor(update: int, config: OptimizerConfig, *, num_updates: int) -> float:
    """Return the factor on the learning rate of an update.

    Args:
        update: Number of earlier updates; skipped steps do not count.
        config: Warm-up and schedule.
        num_updates: Updates of the whole run, after which a schedule stays at its minimum.
    """
    warmup = config.warmup_steps
    if update < warmup:
        return (update + 1) / (warmup + 1)
    schedule = config.schedule
    match schedule.kind:
        case "constant":
            return 1.0
        case "linear":
            return linear_decay(_progress(update, warmup, num_updates), schedule.min_ratio)
        case "cosine":
            return cosine_decay(_progress(update, warmup, num_updates), schedule.min_ratio)
        case "wsd":
            return _decay(schedule)(_progress(update, num_updates - schedule.decay_steps, num_updates))


def linear_decay(progress: float, minimum: float) -> float:
    """Return the value of a straight line from 1 to `minimum`; `progress` is from 0 to 1."""
    return minimum + (1 - minimum) * (1 - progress)


def cosine_decay(progress: float, minimum: float) -> float:
    """Return the value of half a cosine from 1 to `minimum`.

    Source: Loshchilov & Hutter 2017, "SGDR: Stochastic Gradient Descent with Warm Restarts", eq. 5.
    """
    return minimum + (1 - minimum) * 0.5 * (1 + math.cos(math.pi * progress))


def square_root_decay(progress: float, minimum: float) -> float:
    """Return 1 - sqrt(progress), scaled to end at `minimum`.

    Source: Hägele et al. 2024, "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations", eq. 2.
    """
    return minimum + (1 - minimum) * (1 - math.sqrt(progress))


def _decay(schedule: ScheduleConfig) -> functools.partial[float]:
    """Return the last phase of warm-up, stable, decay.

    Source: Hu et al. 2024, "MiniCPM: Unveiling the Potential of Small Language Models", section 4.
    """
    shapes = {"linear": linear_decay, "cosine": cosine_decay, "1-sqrt": square_root_decay}
    return functools.partial(shapes[schedule.decay], minimum=schedule.min_ratio)


def _progress(update: int, first: int, last: int) -> float:
    """Return the progress from update `first` to `last`, from 0 to 1."""
    return min(1.0, max(0.0, (update - first) / max(1, last - first)))
