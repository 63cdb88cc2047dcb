"""Field numbers are promises to peers of another version: protobuf messages, and JSON of the buckets."""

import pytest
from google.protobuf.message import Message as ProtoMessage

from penstock.bus.buckets.lock_holder import read_lock_holder, write_lock_holder
from penstock.bus.buckets.replica_lease import write_replica
from penstock.records.held_out_replicas import write_held_out_replicas
from penstock.records.published_version import write_published_version
from penstock.v1 import common_pb2, generate_pb2, reward_pb2, rollout_pb2, router_pb2, trainer_pb2

MESSAGES: list[tuple[ProtoMessage, str]] = [
    (
        generate_pb2.GenerateRequest(
            request_id="r",
            session_id="s",
            input_ids=[1, 300],
            images=[common_pb2.Image(data=b"x")],
            sampling=generate_pb2.SamplingParams(
                temperature=1, top_p=0.5, top_k=2, max_new_tokens=4, stop_token_ids=[9]
            ),
            min_policy_version=3,
            chunk_tokens=16,
        ),
        "0a01721201731a0301ac0222030a01782a110d0000803f150000003f180220042a010930033810",
    ),
    (generate_pb2.GenerateRequest(group_id="g", exact_policy_version=3), "4a01675003"),
    (router_pb2.RouteRequest(group_id="g", exact_policy_version=3, reports_prompt=True), "3a016740034801"),
    (rollout_pb2.PrepareWeightsRequest(push_id="p", replaces_newer=True), "0a01705001"),
    (trainer_pb2.GetRunResponse(phase=trainer_pb2.RUN_PHASE_PUSHING, step=3, num_steps=20), "100418032014"),
    (
        trainer_pb2.HeldOutReplicas(replica_ids=["e"], policy_version=3, step=2, trainer_epoch="a"),
        "0a016510031802220161",
    ),
    (
        generate_pb2.GenerateRequest(
            images=[common_pb2.Image(stored=common_pb2.StoredImage(sha256="ab", scope="r.0"))],
        ),
        "220b12090a02616212037 22e30".replace(" ", ""),
    ),
    (
        generate_pb2.GenerateResponse(
            output_ids=[2],
            logprobs=[-0.5],
            version_spans=[common_pb2.VersionSpan(num_tokens=1, policy_version=3)],
            finish_reason=generate_pb2.FINISH_REASON_LENGTH,
            usage=generate_pb2.Usage(num_prompt_tokens=5, num_cached_tokens=4, num_output_tokens=1),
            replica_id="e",
        ),
        "0a01021204000000bf1a040801100320022a06080510041801320165",
    ),
    (
        generate_pb2.GenerateChunk(
            output_ids=[2],
            logprobs=[-0.5],
            version_spans=[common_pb2.VersionSpan(num_tokens=1, policy_version=3)],
            finish_reason=generate_pb2.FINISH_REASON_LENGTH,
            usage=generate_pb2.Usage(num_prompt_tokens=5, num_cached_tokens=4, num_output_tokens=1),
            replica_id="e",
        ),
        "0a01021204000000bf1a040801100320022a06080510041801320165",
    ),
    (
        generate_pb2.GenerateRequest(
            sampling=generate_pb2.SamplingParams(ignore_end=True, constraint=generate_pb2.Constraint(json_schema="{}")),
            num_top_logprobs=2,
            prompt_logprobs=True,
        ),
        "2a0830013a040a027b7d58026001",
    ),
    (generate_pb2.Constraint(regex="a"), "120161"),
    (generate_pb2.Constraint(ebnf="a"), "1a0161"),
    (
        generate_pb2.GenerateChunk(
            top_logprobs=[generate_pb2.TopLogprobs(ids=[2], logprobs=[-0.5])],
            prompt_logprobs=generate_pb2.PromptLogprobs(
                logprobs=[-0.5], top_logprobs=[generate_pb2.TopLogprobs(ids=[2])]
            ),
        ),
        "3a090a01021204000000bf420b0a04000000bf12030a0102",
    ),
    (rollout_pb2.DrainReplicaRequest(grace_s=0.5), "0d0000003f"),
    (rollout_pb2.DrainReplicaResponse(num_finished=3, num_handed_over=2), "08031002"),
    (
        router_pb2.ListReplicasResponse(
            replicas=[
                router_pb2.RoutedReplica(
                    replica=common_pb2.Replica(replica_id="e"),
                    routable=True,
                    unroutable_reason="x",
                    num_in_flight=2,
                    limit=3,
                    load=0.5,
                    breaker=router_pb2.BREAKER_STATE_HALF_OPEN,
                )
            ],
            published_version=4,
            min_policy_version=3,
            num_waiting=5,
            num_waiting_bytes=300,
        ),
        "0a150a030a016510011a017820022803350000003f380310041803200528ac02",
    ),
    (
        router_pb2.RouteRequest(
            session_id="s", min_policy_version=3, prefix_ids=[1, 300], excluded_replica_ids=["e"], ttl_s=0.5
        ),
        "0a017310031a0301ac022201652d0000003f",
    ),
    (
        router_pb2.RouteResponse(route_id="r", replica_id="e", address="h:1"),
        "0a01721201651a03683a31",
    ),
    (router_pb2.RouteRequest(num_prompt_ids=300), "30ac02"),
    (
        router_pb2.RouteResponse(
            route_id="r",
            replica_id="d",
            address="h:1",
            prefill=router_pb2.PrefillRoute(route_id="q", replica_id="p", address="h:2"),
            bootstrap=generate_pb2.Bootstrap(host="h", port=8998, room=1 << 61, policy_version=3),
            max_tokens=9,
        ),
        "0a01721201641a03683a31220b0a01711201701a03683a322a120a016810a6461880808080808080802020033009",
    ),
    (
        router_pb2.ReleaseRouteRequest(route_id="r", outcome=router_pb2.ROUTE_OUTCOME_REJECTED),
        "0a01721004",
    ),
    (
        router_pb2.ReleaseRouteResponse(was_pushed=True),
        "0801",
    ),
    (
        router_pb2.RouterServiceDrainReplicaRequest(replica_id="e", grace_s=0.5),
        "0a0165150000003f",
    ),
    (
        router_pb2.RouterServiceDrainReplicaResponse(num_finished=3, num_handed_over=2),
        "08031002",
    ),
    (
        reward_pb2.VerifyItem(item_id="i", golds=["3"], response="x", profile="math", deadline_s=0.5),
        "0a01691201331a017822046d6174682d0000003f",
    ),
    (
        reward_pb2.Verdict(
            item_id="i",
            score=1,
            status=reward_pb2.VERDICT_STATUS_OK,
            extracted="3",
            method=reward_pb2.VERDICT_METHOD_SYMBOLIC,
            elapsed_s=0.5,
        ),
        "0a016911000000000000f03f18012201332803350000003f",
    ),
    (
        common_pb2.Replica(
            replica_id="e",
            address="h:1",
            role=common_pb2.REPLICA_ROLE_DECODE,
            state=common_pb2.REPLICA_STATE_DRAINING,
            policy_version=3,
            num_running=1,
            num_queued=2,
            max_running=4,
            kv_use=0.5,
        ),
        "0a01651203683a311803200528033001380240044d0000003f",
    ),
    (common_pb2.LockHolder(host="h", pid=300, claim_id="c"), "0a016810ac021a0163"),
    (
        trainer_pb2.PublishedVersion(
            policy_version=4,
            min_policy_version=3,
            run_id="r",
            step=2,
            trainer_epoch="a",
            checkpoint_step=1,
            checkpoint_folder="/c",
        ),
        "080410031a017220022a016130013a022f63",
    ),
    (
        rollout_pb2.PrepareWeightsRequest(
            push_id="p",
            policy_version=3,
            broadcast=rollout_pb2.BroadcastSource(
                group_name="g",
                master_host="h",
                master_port=1,
                rank_offset=2,
                world_size=3,
                backend="gloo",
                chunk_bytes=7,
            ),
            manifest=rollout_pb2.WeightManifest(
                buckets=[
                    rollout_pb2.WeightBucket(tensors=[rollout_pb2.TensorSpec(name="w", dtype="float32", shape=[2, 3])])
                ]
            ),
        ),
        ("0a017010031a140a01671201681801200228033204676c6f6f380722140a120a100a01771207666c6f617433321a020203"),
    ),
    (
        rollout_pb2.PrepareWeightsRequest(
            push_id="p", policy_version=3, disk=rollout_pb2.DiskSource(folder="/s"), deadline_s=0.5
        ),
        "0a017010032a040a022f734d0000003f",
    ),
    (
        rollout_pb2.PauseGenerationRequest(push_id="p", mode=rollout_pb2.PAUSE_MODE_DRAIN, drain_s=0.5),
        "0a017010031d0000003f",
    ),
]


@pytest.mark.parametrize(("message", "wire"), MESSAGES, ids=lambda value: type(value).__name__)
def test_messages_keep_their_wire_format(message: ProtoMessage, wire: str) -> None:
    """Field numbers and types are those of the first release."""
    assert message.SerializeToString(deterministic=True).hex() == wire
    assert type(message).FromString(bytes.fromhex(wire)) == message


def test_values_in_buckets_keep_their_form() -> None:
    """JSON under the contract's names; what a later release adds is ignored."""
    holder = common_pb2.LockHolder(host="h", pid=300, claim_id="c")
    assert write_lock_holder(holder) == b'{"host": "h", "pid": 300, "claim_id": "c"}'
    assert read_lock_holder(b'{"host": "h", "pid": 300, "claim_id": "c", "later": 1}') == holder
    assert read_lock_holder(b"") is None
    published = trainer_pb2.PublishedVersion(policy_version=4, min_policy_version=3, run_id="r")
    assert write_published_version(published) == b'{"policy_version": "4", "min_policy_version": "3", "run_id": "r"}'
    held_out = trainer_pb2.HeldOutReplicas(replica_ids=["e"], policy_version=4, step=2, trainer_epoch="a")
    assert write_held_out_replicas(held_out) == (
        b'{"replica_ids": ["e"], "policy_version": "4", "step": "2", "trainer_epoch": "a"}'
    )
    replica = common_pb2.Replica(replica_id="e", address="h:1", state=common_pb2.REPLICA_STATE_READY)
    assert write_replica(replica) == b'{"replicaId": "e", "address": "h:1", "state": "REPLICA_STATE_READY"}'
