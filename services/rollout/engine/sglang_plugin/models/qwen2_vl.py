"""SGLang's qwen2_vl."""

from sglang.srt.models.qwen2_vl import EntryClass

__all__ = ["EntryClass"]
