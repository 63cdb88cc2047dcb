"""Grammars for engines without a tokenizer, and in engines that are paused.

SGLang makes no grammar back end without a tokenizer, and Penstock's engines read none. The first request with a grammar
makes the back end, which takes a second or two for a large vocabulary; other requests pay nothing.
"""

from typing import Any

_MAX_GRAMMARS = 256
"""Compiled grammars that an engine keeps. SGLang's and XGrammar's own caches have no bound: only pushes that flush
empty them, and clients may give each answer another form."""
_MAX_COMPILED_BYTES = 256 * 2**20
"""Parts of grammars that XGrammar keeps for others."""


def prepare_backend(manager: Any, req: Any, *_args: Any, **_kwargs: Any) -> None:
    """Hook before SGLang's grammar manager sees a request: make the back end if the request needs it."""
    params = req.sampling_params
    needs_grammar = any(each is not None for each in (params.json_schema, params.regex, params.ebnf))
    if needs_grammar and manager.grammar_backend is None:
        manager.grammar_backend = _make_backend(manager.scheduler.model_config)


def queue_compiled(scheduler: Any) -> None:
    """Queue requests whose grammar is compiled, as SGLang's loop does before each batch; wait for them a few ms.

    Ranks agree on them, so each must call it in the same round of its loop.
    """
    for req in scheduler.grammar_manager.get_ready_grammar_requests():
        scheduler._add_request_to_queue(req)


def _make_backend(model_config: Any) -> Any:
    from sglang.srt.constrained.xgrammar_backend import GrammarCompiler, XGrammarGrammarBackend
    from sglang.srt.runtime_context import get_serving
    from transformers import AutoTokenizer

    settings = get_serving()
    backend = XGrammarGrammarBackend(
        AutoTokenizer.from_pretrained(model_config.model_path, local_files_only=True),
        vocab_size=model_config.vocab_size,
        model_eos_token_ids=sorted(model_config.hf_eos_token_id or ()) or None,
        any_whitespace=not settings.constrained_json_disable_any_whitespace,
        max_whitespace_cnt=settings.constrained_json_max_whitespace_cnt,
    )
    backend.cache = _Newest()
    backend.grammar_compiler = GrammarCompiler(backend._tokenizer_info, cache_limit_bytes=_MAX_COMPILED_BYTES)
    return backend


class _Newest(dict[Any, Any]):
    """The newest entries; all ranks compile in one order, so they keep the same ones."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        if len(self) > _MAX_GRAMMARS:
            del self[next(iter(self))]
