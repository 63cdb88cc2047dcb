"""SGLang's qwen3_vl_moe."""

from sglang.srt.models.qwen3_vl_moe import EntryClass

__all__ = ["EntryClass"]
