"""SGLang's qwen2_5_vl."""

from sglang.srt.models.qwen2_5_vl import EntryClass

__all__ = ["EntryClass"]
