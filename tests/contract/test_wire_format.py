"""Field numbers and record names are promises to peers of another version and to messages that outlive an upgrade."""

import msgpack
import numpy as np
import pytest
from google.protobuf.message import Message as ProtoMessage

from penstock.bus.buckets.lock_holder import read_lock_holder, write_lock_holder
from penstock.bus.buckets.replica_lease import write_replica
from penstock.errors import CorruptMessageError
from penstock.records import (
    Group,
    GroupId,
    ImagePart,
    Limits,
    Message,
    Prompt,
    Record,
    RecordedCall,
    Sample,
    Sampling,
    TextPart,
    TokenSequence,
    ToolCall,
    Turn,
    Verdict,
    VersionSpan,
)
from penstock.records.codec import decode, encode
from penstock.records.published_version import write_published_version
from penstock.v1 import common_pb2, generate_pb2, reward_pb2, rollout_pb2, router_pb2, trainer_pb2

HASH = "ab" * 32
PROMPT = Prompt(
    id=GroupId(run_id="run-1", index=7, attempt=1, trainer_epoch="a"),
    admitted_version=3,
    exact_version=4,
    purpose="geo3k-test",
    num_samples=1,
    sampling=Sampling(temperature=0.5, top_p=0.9, top_k=3, max_new_tokens=8),
    messages=(Message(role="user", parts=(ImagePart(index=0), TextPart(text="Find x."))),),
    tools=({"type": "function"},),
    chat_template_kwargs={"enable_thinking": False},
    images=(HASH,),
    golds=("3",),
    profile="geo3k",
    environment="single_turn",
    limits=Limits(
        max_turns=2,
        max_tokens=100,
        max_observation_tokens=50,
        max_images=4,
        max_pixels=10_000,
        turn_timeout_s=1.5,
        episode_timeout_s=2.5,
    ),
    extra={"level": 5},
)
SAMPLE = Sample(
    sequences=(
        TokenSequence(
            token_ids=np.array([5, 6, 7], np.int32),
            loss_mask=np.array([False, True, True]),
            logprobs=np.array([0, -0.5, -1.25], np.float32),
            version_spans=(VersionSpan(num_tokens=2, policy_version=3),),
            images=(HASH,),
            num_prompt_tokens=9,
            num_last_turn_tokens=2,
            routed_experts=np.array([[[1, 2]]] * 3, np.int32),
        ),
    ),
    reward=1.0,
    metrics={"distance": 0.5},
    finish_reason="deadline",
    error="",
    verdict=Verdict(score=1.0, status="OK", extracted="3", method="EXACT"),
    turns=(
        Turn(
            replica_id="e",
            num_prompt_tokens=9,
            num_cached_tokens=4,
            num_output_tokens=2,
            waited_s=0.5,
            generated_s=0.25,
            reward=-1.0,
            metrics={"step": 1.0},
        ),
    ),
    started_at=1.5,
    elapsed_s=0.75,
    text="3",
)
GROUP = Group(
    id=PROMPT.id,
    purpose="geo3k-test",
    environment="single_turn",
    num_samples=1,
    samples=(SAMPLE,),
    worker_id="w",
    num_deliveries=2,
)
CALL = RecordedCall(
    session="s",
    request_id="q",
    choice=1,
    created=2.5,
    input_ids=np.array([5], np.int32),
    images=(b"\x89PNG",),
    output_ids=np.array([6, 7], np.int32),
    logprobs=np.array([-0.5, -1.25], np.float32),
    version_spans=(VersionSpan(num_tokens=2, policy_version=3),),
    finish_reason="stop",
    temperature=0.5,
    top_p=1.0,
    top_k=0,
    num_prompt_tokens=9,
    num_cached_tokens=4,
    text="3",
)

PROMPT_WIRE = (
    "de0010ae7265636f72645f76657273696f6e02a2696484a672756e5f6964a572756e2d31a5696e64657807a761747465"
    "6d707401ad747261696e65725f65706f6368a161b061646d69747465645f76657273696f6e03ad65786163745f766572"
    "73696f6e04a7707572706f7365aa67656f336b2d74657374ab6e756d5f73616d706c657301a873616d706c696e6784ab"
    "74656d7065726174757265cb3fe0000000000000a5746f705f70cb3feccccccccccccda5746f705f6b03ae6d61785f6e"
    "65775f746f6b656e7308a86d657373616765739182a4726f6c65a475736572a570617274739282a474797065a5696d61"
    "6765a5696e6465780082a474797065a474657874a474657874a746696e6420782ea5746f6f6c739181a474797065a866"
    "756e6374696f6eb4636861745f74656d706c6174655f6b776172677381af656e61626c655f7468696e6b696e67c2a669"
    "6d6167657391d94061626162616261626162616261626162616261626162616261626162616261626162616261626162"
    "616261626162616261626162616261626162616261626162a5676f6c647391a133a770726f66696c65a567656f336bab"
    "656e7669726f6e6d656e74ab73696e676c655f7475726ea66c696d69747387a96d61785f7475726e7302aa6d61785f74"
    "6f6b656e7364b66d61785f6f62736572766174696f6e5f746f6b656e7332aa6d61785f696d6167657304aa6d61785f70"
    "6978656c73cd2710ae7475726e5f74696d656f75745f73cb3ff8000000000000b1657069736f64655f74696d656f7574"
    "5f73cb4004000000000000a5657874726181a56c6576656c05"
)
GROUP_WIRE = (
    "8aae7265636f72645f76657273696f6e02a2696484a672756e5f6964a572756e2d31a5696e64657807a7617474656d70"
    "7401ad747261696e65725f65706f6368a161a7707572706f7365aa67656f336b2d74657374ab656e7669726f6e6d656e"
    "74ab73696e676c655f7475726eab6e756d5f73616d706c657301a773616d706c6573918aa973657175656e6365739188"
    "a9746f6b656e5f69647393a33c69349103c40c050000000600000007000000a96c6f73735f6d61736b93a37c62319103"
    "c403000101a86c6f6770726f627393a33c66349103c40c00000000000000bf0000a0bfad76657273696f6e5f7370616e"
    "7391920203a6696d6167657391d940616261626162616261626162616261626162616261626162616261626162616261"
    "62616261626162616261626162616261626162616261626162616261626162b16e756d5f70726f6d70745f746f6b656e"
    "7309b46e756d5f6c6173745f7475726e5f746f6b656e7302ae726f757465645f6578706572747393a33c693493030102"
    "c418010000000200000001000000020000000100000002000000a6726577617264cb3ff0000000000000a76d65747269"
    "637381a864697374616e6365cb3fe0000000000000ad66696e6973685f726561736f6ea8646561646c696e65a5657272"
    "6f72a0a77665726469637484a573636f7265cb3ff0000000000000a6737461747573a24f4ba9657874726163746564a1"
    "33a66d6574686f64a54558414354a57475726e739188aa7265706c6963615f6964a165b16e756d5f70726f6d70745f74"
    "6f6b656e7309b16e756d5f6361636865645f746f6b656e7304b16e756d5f6f75747075745f746f6b656e7302a8776169"
    "7465645f73cb3fe0000000000000ab67656e6572617465645f73cb3fd0000000000000a6726577617264cbbff0000000"
    "000000a76d65747269637381a473746570cb3ff0000000000000aa737461727465645f6174cb3ff8000000000000a965"
    "6c61707365645f73cb3fe8000000000000a474657874a133a9776f726b65725f6964a177a56572726f72a0a769735f6c"
    "6f7374c2ae6e756d5f64656c6976657269657302"
)
CALL_WIRE = (
    "de0011ae7265636f72645f76657273696f6e02a773657373696f6ea173aa726571756573745f6964a171a663686f6963"
    "6501a763726561746564cb4004000000000000a9696e7075745f69647393a33c69349101c40405000000a6696d616765"
    "7391c40489504e47aa6f75747075745f69647393a33c69349102c4080600000007000000a86c6f6770726f627393a33c"
    "66349102c408000000bf0000a0bfad76657273696f6e5f7370616e7391920203ad66696e6973685f726561736f6ea473"
    "746f70ab74656d7065726174757265cb3fe0000000000000a5746f705f70cb3ff0000000000000a5746f705f6b00b16e"
    "756d5f70726f6d70745f746f6b656e7309b16e756d5f6361636865645f746f6b656e7304a474657874a133"
)

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
    (router_pb2.RouteRequest(group_id="g", exact_policy_version=3), "3a01674003"),
    (rollout_pb2.PrepareWeightsRequest(push_id="p", replaces_newer=True), "0a01705001"),
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
    replica = common_pb2.Replica(replica_id="e", address="h:1", state=common_pb2.REPLICA_STATE_READY)
    assert write_replica(replica) == b'{"replicaId": "e", "address": "h:1", "state": "REPLICA_STATE_READY"}'


@pytest.mark.parametrize(
    ("record", "wire"), [(PROMPT, PROMPT_WIRE), (GROUP, GROUP_WIRE), (CALL, CALL_WIRE)], ids=["prompt", "group", "call"]
)
def test_records_on_the_bus_are_still_read(record: Record, wire: str) -> None:
    """What an earlier release stored decodes to the same record, and is stored the same way today."""
    assert encode(record).hex() == wire
    assert encode(decode(bytes.fromhex(wire), type(record))).hex() == wire


CALLING = Message(
    role="assistant", parts=(TextPart(text="I look."),), tool_calls=(ToolCall(name="zoom", arguments={"factor": 2}),)
)
CALLING_WIRE = (
    "83a4726f6c65a9617373697374616e74a570617274739182a474797065a474657874a474657874a749206c6f6f6b2eaa746f6f6c5f63616c"
    "6c739182a46e616d65a47a6f6f6da9617267756d656e747381a6666163746f7202"
)


def test_a_message_without_calls_is_stored_as_before_there_were_any() -> None:
    """So that prompts of neighbouring releases are the same bytes; a message that calls has one field more."""
    assert encode(CALLING).hex() == CALLING_WIRE
    assert decode(bytes.fromhex(CALLING_WIRE), Message) == CALLING
    assert set(msgpack.unpackb(encode(PROMPT.messages[0]))) == {"role", "parts"}
    assert decode(msgpack.packb({"role": "user", "parts": [], "later": 1}), Message).tool_calls == ()
    with pytest.raises(CorruptMessageError, match="role user has tool_calls"):
        decode(bytes.fromhex(CALLING_WIRE.replace("a9617373697374616e74", "a475736572")), Message)


@pytest.mark.parametrize("record", [PROMPT, GROUP, CALL], ids=["prompt", "group", "call"])
def test_records_are_plain_msgpack(record: Record) -> None:
    """The `msgpack` package reads each field under its name; an array is its type, its shape and its bytes."""
    wire = msgpack.unpackb(encode(record))
    assert wire["record_version"] == 2
    assert set(wire) == set(record.__struct_fields__)
    if isinstance(record, Group):
        [sequence] = wire["samples"][0]["sequences"]
        dtype, shape, data = sequence["logprobs"]
        assert np.frombuffer(data, dtype).reshape(shape).tolist() == [0, -0.5, -1.25]
        assert sequence["version_spans"] == [[2, 3]]
