"""The tokenizer of the tiny models: words ``w0``, ``w1``, ... after three special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["EOS_TOKEN_ID", "PAD_TOKEN_ID", "SPECIAL_TOKENS", "UNK_TOKEN_ID", "new_tokenizer"]

PAD_TOKEN_ID, EOS_TOKEN_ID, UNK_TOKEN_ID = 0, 1, 2
SPECIAL_TOKENS = {"<pad>": PAD_TOKEN_ID, "<eos>": EOS_TOKEN_ID, "<unk>": UNK_TOKEN_ID}

# Whitespace separates words, so that a message's first word keeps its own token.
_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] + ' ' + eos_token + ' ' }}{% endfor %}"
_VISION_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['content'] is string %}{{ message['content'] + ' ' }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|> ' }}"
    "{% else %}{{ part['text'] + ' ' }}{% endif %}"
    "{% endfor %}{% endif %}{{ eos_token + ' ' }}{% endfor %}"
)


def new_tokenizer(words: int, architecture: str, last: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A word-level tokenizer with left padding and a chat template.

    Args:
        last: special tokens of a vision model, which stand behind the words.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = SPECIAL_TOKENS | {f"w{word}": len(SPECIAL_TOKENS) + word for word in range(words)}
    vocabulary |= {token: len(vocabulary) + place for place, token in enumerate(last)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = _fast_class(vision=bool(last))(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        chat_template=_VISION_CHAT_TEMPLATE if last else _CHAT_TEMPLATE,
        **({"additional_special_tokens": list(last)} if last else {}),
    )
    if _auto_tokenizer_overrules(architecture):
        # An entry in the auto map, even an empty one, makes AutoTokenizer honour the class that was saved.
        fast._auto_map = {"AutoTokenizer": [None, None]}
    return fast


def _fast_class(*, vision: bool) -> type[PreTrainedTokenizerFast]:
    """The class of the tokenizer: Qwen2-VL's processor takes Qwen2's own alone up to Transformers 4, and any later.

    That of Transformers 5 makes a byte-level tokenizer, whatever it is given.
    """
    from transformers import PreTrainedTokenizerFast, Qwen2TokenizerFast

    keeps_what_it_is_given = getattr(Qwen2TokenizerFast, "slow_tokenizer_class", None) is not None
    return Qwen2TokenizerFast if vision and keeps_what_it_is_given else PreTrainedTokenizerFast


def _auto_tokenizer_overrules(architecture: str) -> bool:
    """Whether ``AutoTokenizer`` loads a class of its own choice, whatever class the saved tokenizer has.

    Transformers 5 does so for Qwen2: it makes a byte-level tokenizer of ours, which encodes every prompt to nothing.
    """
    from transformers.models.auto import tokenization_auto

    return architecture in getattr(tokenization_auto, "MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS", ())
