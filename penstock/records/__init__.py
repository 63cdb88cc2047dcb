"""What travels on the bus: prompts to the workers, finished groups to the trainer, recorded calls.

Every record checks itself, at construction and when decoded (`penstock.records.codec`).
"""

from penstock.records.group import Group
from penstock.records.prompt import ImagePart, Message, Prompt, TextPart, group_id, parse_message_id
from penstock.records.record import Record, to_builtins
from penstock.records.recorded_call import RecordedCall
from penstock.records.sample import UNJUDGED, Sample, Verdict, VersionSpan

__all__ = [
    "UNJUDGED",
    "Group",
    "ImagePart",
    "Message",
    "Prompt",
    "Record",
    "RecordedCall",
    "Sample",
    "TextPart",
    "Verdict",
    "VersionSpan",
    "group_id",
    "parse_message_id",
    "to_builtins",
]
