"""Recurring work leaves the rest of the time to others."""

import pytest

from penstock.runtime.duty_cycle import DutyCycle


async def test_work_is_followed_by_a_rest_in_proportion() -> None:
    """A share of a tenth rests nine times as long as it worked, in several pieces or in one, up to the limit."""
    now, rests = 0.0, []

    async def sleep(seconds: float) -> None:
        rests.append(seconds)

    duty = DutyCycle(share=0.1, max_rest_s=0.5, clock=lambda: now, sleep=sleep)
    with duty.work():
        now += 0.001
    now += 10.0  # is others' work
    with duty.work():
        now += 0.002
    await duty.rest()
    await duty.rest()
    with duty.work():
        now += 1.0
    await duty.rest()
    with duty.work():
        now += 0.003
    duty.leave_out(0.002)
    await duty.rest()
    assert rests == pytest.approx([0.027, 0.0, 0.5, 0.009])
