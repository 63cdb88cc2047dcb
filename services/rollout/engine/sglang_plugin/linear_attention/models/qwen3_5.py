"""SGLang's qwen3_5."""

from sglang.srt.models.qwen3_5 import EntryClass

__all__ = ["EntryClass"]
