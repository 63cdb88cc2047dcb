"""SGLang's qwen3_moe."""

from sglang.srt.models.qwen3_moe import EntryClass

__all__ = ["EntryClass"]
