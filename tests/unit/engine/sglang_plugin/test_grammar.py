"""The grammar back end that an engine makes at the first request that needs one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.model.tokens import vocab_size
from services.rollout.engine.sglang_plugin.grammar import prepare_backend


def make_backend(model_path: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Any:
    """The back end after a first request for JSON."""
    monkeypatch.setattr("sglang.srt.runtime_context.get_serving", lambda: SimpleNamespace(**settings))
    model = SimpleNamespace(model_path=str(model_path), vocab_size=vocab_size(model_path), hf_eos_token_id=None)
    manager: Any = SimpleNamespace(grammar_backend=None, scheduler=SimpleNamespace(model_config=model))
    params = SimpleNamespace(json_schema="{}", regex=None, ebnf=None)
    prepare_backend(manager, SimpleNamespace(sampling_params=params))
    return manager.grammar_backend


@pytest.mark.parametrize(("is_compact", "max_whitespace"), [(False, None), (True, None), (False, 2)])
def test_a_recipe_says_what_whitespace_json_may_have(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch, is_compact: bool, max_whitespace: int | None
) -> None:
    """SGLang's settings of whitespace reach XGrammar, although Penstock makes the back end."""
    made = make_backend(
        tiny_model_path,
        monkeypatch,
        constrained_json_disable_any_whitespace=is_compact,
        constrained_json_max_whitespace_cnt=max_whitespace,
    )
    assert (made.any_whitespace, made.max_whitespace_cnt) == (not is_compact, max_whitespace)


def test_forms_that_are_all_different_do_not_fill_the_memory(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest ones stay compiled; a push may never come."""
    made = make_backend(
        tiny_model_path,
        monkeypatch,
        constrained_json_disable_any_whitespace=False,
        constrained_json_max_whitespace_cnt=None,
    )
    for number in range(1000):
        made.set_cache(("json", str(number)), object())
    assert 100 < len(made.cache) < 500
    assert ("json", "999") in made.cache
    assert 0 < made.grammar_compiler.cache_limit_bytes < 2**30
