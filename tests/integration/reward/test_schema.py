"""The HTTP frontend against its own OpenAPI page: whatever a client sends, the answer is one that the page promises."""

import contextlib
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from tests.support.reward.process import reward_process

_SETTINGS = settings(
    max_examples=30,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def api() -> Iterator[schemathesis.BaseSchema]:
    """The page of a service that runs."""
    with reward_process("--reward.workers=1") as service:
        yield schemathesis.openapi.from_url(f"{service.url}/openapi.json")


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
def test_answers_are_as_described(api: schemathesis.BaseSchema, mode: schemathesis.GenerationMode) -> None:
    """Statuses, headers and bodies; no request, by the page or against it, is an internal error."""
    assert sum(num_tried(found.ok(), mode) for found in api.get_all_operations()) > 100


def num_tried(operation: schemathesis.APIOperation, mode: schemathesis.GenerationMode) -> int:
    """Try one operation and return the number of requests."""
    # No page can say that query, prompts and labels are of one length; and what trainers send is taken as it comes.
    excluded = [positive_data_acceptance, negative_data_rejection] if operation.path == "/get_reward" else []
    cases = 0

    @_SETTINGS
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        nonlocal cases
        cases += 1
        case.call_and_validate(excluded_checks=excluded)

    with contextlib.suppress(Unsatisfiable):  # nothing that could be sent is against the page
        check()
    return cases
