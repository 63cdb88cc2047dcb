"""An engine that is given an older version, as one that takes the place of a held-out replica that died."""

import asyncio
import random

import grpc
import pytest
import torch

from penstock.v1 import rollout_pb2
from services.rollout.testing.engine_process import EngineProcess
from tests.support.engine.push import Push
from tests.support.engine.reference import TOLERANCE, Reference, prompt, request, until_replica
from tests.support.engine.traffic import Traffic

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.usefixtures("rendezvous")]

MODES = [rollout_pb2.PAUSE_MODE_RETRACT, rollout_pb2.PAUSE_MODE_IN_PLACE]


@pytest.mark.parametrize("mode", MODES)
async def test_an_older_version_ends_what_runs_and_serves_as_it_did(
    engine: EngineProcess, current: Reference, mode: rollout_pb2.PauseMode.ValueType
) -> None:
    """Nobody gets tokens of it who did not ask; those who do get its log-probabilities, although the prompt was cached
    under both versions."""
    version = (await engine.replica()).policy_version
    ids = prompt(random.Random(5), num_images=0, image_id=None, length=80)
    newer = current.perturbed(seed=7)
    try:
        await engine.generation.Generate(request(ids), timeout=120)
        await Push(engine, newer.weights, version + 1).complete()
        wanted = request(ids, max_new_tokens=900)
        wanted.min_policy_version = version + 1
        wanted.sampling.ignore_end = True
        push = Push(engine, current.weights, version, mode=mode, replaces_newer=True)
        await push.prepare()
        traffic = Traffic(lambda _: engine.generation.Generate(wanted, timeout=120), 8)
        await until_replica(engine, lambda replica: replica.num_running >= 4)
        await push.pause()
        traffic.stop()
        late = asyncio.ensure_future(engine.generation.Generate(wanted, timeout=120))
        for stage in (push.transfer, push.commit):
            await stage()
        await asyncio.to_thread(push.group.close)
        ends = await asyncio.gather(*traffic.calls, late, return_exceptions=True)
        failed = [end for end in ends if isinstance(end, grpc.aio.AioRpcError)]
        assert len(failed) >= 2, "too few were running to show anything"
        assert {end.code() for end in failed} <= {
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.FAILED_PRECONDITION,
        }
        for end in ends:
            if not isinstance(end, BaseException):  # it had ended before the push
                assert {span.policy_version for span in end.version_spans} == {version + 1}
        exact = request(ids)
        exact.exact_policy_version = version
        answer = await engine.generation.Generate(exact, timeout=120)
        assert [span.policy_version for span in answer.version_spans] == [version]
        expected, _ = current.logprobs(ids, [], answer.output_ids, temperature=1.0)
        assert (torch.tensor(list(answer.logprobs)) - expected).abs().max() < TOLERANCE
        exact.exact_policy_version = version + 1
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await engine.generation.Generate(exact, timeout=120)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    finally:
        # No other test may meet these numbers with other weights.
        await Push(engine, current.weights, version + 2).complete()
