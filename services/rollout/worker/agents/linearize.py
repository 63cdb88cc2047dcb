"""Turns the answers of a session into sequences to train on. Pure.

Calls form a tree: a call's parent is the longest call whose prompt and answer are an exact prefix of the call's own
prompt, images included. Each leaf is a sequence: all that the engine saw and said on the path to it.

Invariants: every answer is trained in exactly one sequence, the first that holds it; in the others it is context. So
the sampled tokens are trained once each, after exactly the ids that they were sampled after. Sequences are in the order
of their last calls.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from penstock.records import SessionCall, TokenSequence, Turn, VersionSpan


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Node:
    """A call with its whole prompt."""

    call: SessionCall
    prompt_ids: np.ndarray
    images: tuple[str, ...]
    """Images of the whole prompt."""
    parent: int | None
    """Index of the parent node; None for a root."""

    @property
    def num_tokens(self) -> int:
        """Length of prompt and answer."""
        return len(self.prompt_ids) + len(self.call.output_ids)


def linearize(calls: Sequence[tuple[int, SessionCall]]) -> tuple[TokenSequence, ...]:
    """Return the sequences of a session's numbered calls, in order; at least one call.

    Raises:
        ValueError: a call continues one that is missing.
    """
    nodes = _tree(calls)
    parents = {node.parent for node in nodes}
    trained: set[int] = set()
    sequences = []
    for index in range(len(nodes)):
        if index not in parents:
            sequences.append(_sequence(nodes, _path(nodes, index), trained))
    return tuple(sequences)


def turns_of(calls: Sequence[tuple[int, SessionCall]]) -> tuple[Turn, ...]:
    """Return every call as a turn of the sample."""
    return tuple(
        Turn(
            replica_id=call.replica_id,
            num_prompt_tokens=call.num_prompt_tokens,
            num_cached_tokens=call.num_cached_tokens,
            num_output_tokens=len(call.output_ids),
            started_at=call.started_at,
            waited_s=call.waited_s,
            generated_s=call.generated_s,
        )
        for _, call in calls
    )


def _tree(calls: Sequence[tuple[int, SessionCall]]) -> list[_Node]:
    nodes: list[_Node] = []
    node_of: dict[int, int] = {}
    whole: list[bytes] = []
    """Prompt and answer of each node."""
    for number, call in calls:
        prompt, images = b"", call.images
        if call.continues:
            if call.continues not in node_of:
                raise ValueError(f"call {number} continues call {call.continues}, which is not before it")
            before = node_of[call.continues]
            prompt, images = whole[before], (*nodes[before].images, *call.images)
        prompt += call.input_ids.tobytes()
        node_of[number] = len(nodes)
        ids = np.frombuffer(prompt, "<i4")
        parent = _parent(nodes, whole, prompt, images, node_of.get(call.continues))
        nodes.append(_Node(call=call, prompt_ids=ids, images=images, parent=parent))
        whole.append(prompt + call.output_ids.tobytes())
    return nodes


def _parent(
    nodes: Sequence[_Node], whole: Sequence[bytes], prompt: bytes, images: Sequence[str], recorded: int | None
) -> int | None:
    """Return the longest call that is an exact prefix of `prompt`; of equal ones the recorded one, or the first."""
    best, best_length = recorded, 0 if recorded is None else len(whole[recorded])
    for index, ids in enumerate(whole):
        shown = nodes[index].images
        if best_length < len(ids) <= len(prompt) and prompt.startswith(ids) and tuple(images[: len(shown)]) == shown:
            best, best_length = index, len(ids)
    return best


def _path(nodes: Sequence[_Node], leaf: int) -> list[int]:
    """Return the indices from the root to the leaf."""
    path = [leaf]
    while (parent := nodes[path[-1]].parent) is not None:
        path.append(parent)
    return path[::-1]


def _sequence(nodes: Sequence[_Node], path: Sequence[int], trained: set[int]) -> TokenSequence:
    """Return the sequence that ends with the path's last call; add the calls that it trains to `trained`."""
    leaf = nodes[path[-1]]
    mask = np.zeros(leaf.num_tokens, dtype="|b1")
    logprobs = np.zeros(leaf.num_tokens, dtype="<f4")
    spans: list[VersionSpan] = []
    for index in path:
        node = nodes[index]
        if index in trained:
            continue
        trained.add(index)
        answer = slice(len(node.prompt_ids), node.num_tokens)
        mask[answer], logprobs[answer] = True, node.call.logprobs
        for span in node.call.version_spans:
            if spans and spans[-1].policy_version == span.policy_version:
                joined = spans.pop().num_tokens + span.num_tokens
                span = VersionSpan(num_tokens=joined, policy_version=span.policy_version)
            spans.append(span)
    return TokenSequence(
        token_ids=np.concatenate([leaf.prompt_ids, leaf.call.output_ids]),
        loss_mask=mask,
        logprobs=logprobs,
        version_spans=tuple(spans),
        images=leaf.images,
        num_prompt_tokens=leaf.call.num_prompt_tokens,
        num_last_turn_tokens=len(leaf.call.output_ids),
    )
