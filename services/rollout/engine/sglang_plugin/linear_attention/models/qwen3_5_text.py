"""SGLang's qwen3_5_text."""

from sglang.srt.models.qwen3_5_text import EntryClass

__all__ = ["EntryClass"]
