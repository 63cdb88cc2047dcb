"""SGLang's qwen3_vl."""

from sglang.srt.models.qwen3_vl import EntryClass

__all__ = ["EntryClass"]
