"""The records on the bus: prompts for the workers, finished groups for the trainer, recorded calls, agents' sessions.

Every record validates itself, at construction and when decoded (`penstock.records.codec`).
"""

from penstock.records.group import Group
from penstock.records.prompt import (
    GroupId,
    ImagePart,
    Limits,
    Message,
    Prompt,
    Sampling,
    TextPart,
    ToolCall,
    text_for_verifiers,
)
from penstock.records.record import RECORD_VERSION, Envelope, Record, to_builtins
from penstock.records.recorded_call import RecordedCall
from penstock.records.sample import Sample, TokenSequence, Turn, Verdict, VersionSpan
from penstock.records.session import SessionCall, SessionFailure, SessionId, SessionState

__all__ = [
    "RECORD_VERSION",
    "Envelope",
    "Group",
    "GroupId",
    "ImagePart",
    "Limits",
    "Message",
    "Prompt",
    "Record",
    "RecordedCall",
    "Sample",
    "Sampling",
    "SessionCall",
    "SessionFailure",
    "SessionId",
    "SessionState",
    "TextPart",
    "TokenSequence",
    "ToolCall",
    "Turn",
    "Verdict",
    "VersionSpan",
    "text_for_verifiers",
    "to_builtins",
]
