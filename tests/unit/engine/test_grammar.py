"""The grammar back end that an engine makes at the first request that needs one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.model.tokens import vocab_size
from services.rollout.engine.sglang_plugin.grammar import prepare_backend


@pytest.mark.parametrize(("is_compact", "max_whitespace"), [(False, None), (True, None), (False, 2)])
def test_a_recipe_says_what_whitespace_json_may_have(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch, is_compact: bool, max_whitespace: int | None
) -> None:
    """SGLang's settings of whitespace reach XGrammar, although Penstock makes the back end."""
    settings = SimpleNamespace(
        constrained_json_disable_any_whitespace=is_compact, constrained_json_max_whitespace_cnt=max_whitespace
    )
    monkeypatch.setattr("sglang.srt.runtime_context.get_serving", lambda: settings)
    model = SimpleNamespace(
        model_path=str(tiny_model_path), vocab_size=vocab_size(tiny_model_path), hf_eos_token_id=None
    )
    manager: Any = SimpleNamespace(grammar_backend=None, scheduler=SimpleNamespace(model_config=model))
    params = SimpleNamespace(json_schema="{}", regex=None, ebnf=None)
    prepare_backend(manager, SimpleNamespace(sampling_params=params))
    made = manager.grammar_backend
    assert (made.any_whitespace, made.max_whitespace_cnt) == (not is_compact, max_whitespace)
