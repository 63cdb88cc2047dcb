"""Benchmarks that start a script by its file find it."""

from bench.churn import ENGINES_SCRIPT
from bench.support.router_subjects import ENGINE_SCRIPT


def test_the_engines_of_bench_router_and_churn_are_there() -> None:
    """Otherwise both wait for engines that never start."""
    assert ENGINE_SCRIPT.is_file()
    assert ENGINES_SCRIPT.is_file()
