"""What SFT's data are made of, and which tokens of it are an assistant's."""

from __future__ import annotations

from pathlib import Path

import pytest
import trl

from pytest_trlcompat import tiny
from pytest_trlcompat.conformance.sft import data

MODEL = tiny.qwen2()
TALK = {
    "messages": [
        {"role": "user", "content": "w0"},
        {"role": "assistant", "content": "w1 w2"},
        {"role": "user", "content": "w3"},
    ]
}


@pytest.mark.parametrize("family, ends", [("qwen3", ["<unk>", "<unk>"]), ("glm4moe", ["<unk>"])])
def test_what_ends_a_turn_is_the_assistants(family: str, ends: list[str]) -> None:
    """The markers and new lines of a template are tokens, unknown ones: of Qwen3 its end and a new line, of GLM-4-MoE
    the marker of the next message."""
    if not (Path(trl.__file__).parent / "chat_templates" / f"{family}.jinja").is_file():
        pytest.skip(f"TRL {trl.__version__} has no file of {family}'s template")
    words = data.tokenizer(MODEL, {"tokenizer": family})
    text = words.apply_chat_template(TALK["messages"], tokenize=False)
    tokens = words.convert_ids_to_tokens(words(text, add_special_tokens=False)["input_ids"])
    own = [token for token, counts in zip(tokens, data._generated(TALK, words), strict=True) if counts]
    assert [token for token in own if token.startswith("w")] == ["w1", "w2"]
    assert own[own.index("w2") + 1 :] == ends
    assert tokens[len(tokens) - tokens[::-1].index("w2") : tokens.index("w3")] != ends
