"""Grammars for engines without a tokenizer.

SGLang makes no grammar back end if it reads no tokenizer, and Penstock's engines read none. The first request that has
a grammar makes one, which takes a second or two for a large vocabulary; without such a request it costs nothing.
"""

from typing import Any


def prepare_backend(manager: Any, req: Any, *_args: Any, **_kwargs: Any) -> None:
    """Before SGLang's grammar manager looks at a request: see that there is a back end if the request needs one."""
    params = req.sampling_params
    needs_grammar = any(each is not None for each in (params.json_schema, params.regex, params.ebnf))
    if needs_grammar and manager.grammar_backend is None:
        manager.grammar_backend = _make_backend(manager.scheduler.model_config)


def _make_backend(model_config: Any) -> Any:
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
    from transformers import AutoTokenizer

    return XGrammarGrammarBackend(
        AutoTokenizer.from_pretrained(model_config.model_path, local_files_only=True),
        vocab_size=model_config.vocab_size,
        model_eos_token_ids=sorted(model_config.hf_eos_token_id or ()) or None,
    )
