"""SGLang's qwen2."""

from sglang.srt.models.qwen2 import EntryClass

__all__ = ["EntryClass"]
