"""The models and tokenizers that TRL's tests load from the Hub, made here: ``models FOLDER VOCABULARY NAME ...``.

They are saved in the layout of the Hub's cache, so that TRL and Transformers load them by their names, offline, with
nothing patched. Weights are random and the same in every run; sizes are those of the models on the Hub, since tests
count parameters.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ORGANISATION = "trl-internal-testing"
REVISION = "0" * 40
"""Stands for a commit of the Hub."""


@dataclass(frozen=True)
class Vocabulary:
    """Bytes, from number 0 on; then what is listed here.

    Attributes:
        tokens: numbers of tokens that are found in text as a whole, those of :data:`_TOKENS` in their order.
        words: numbers of tokens that stand for more than one byte.
    """

    size: int
    tokens: tuple[int, ...]
    words: Mapping[int, str]


_TOKENS = (
    *("<|endoftext|>", "<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>"),
    "<|finetune_right_pad_id|>",  # a test of a Llama pads with it
    # What else is in conversations with tools: written in bytes, it would exceed the length that tests allow.
    *("<tool_response>", "</tool_response>", "<think>", "</think>", "assistant", " unexpected keyword argument"),
)

VOCABULARIES = {
    "small": Vocabulary(512, tuple(range(500, 512)), {}),
    "qwen": Vocabulary(
        151665,
        (151643, 151645, 151644, 151657, 151658, *range(151646, 151653)),
        {
            **{606: "name", 788: '":', 330: ' "', 497: '",', 4913: '{"', 5212: ' {"', 314: " {", 11248: "}}\n"},
            **{16370: "arguments", 64648: "multiply", 22785: "_tool", 7692: "async", 93054: "_multiply", 293: " b"},
            **{1513: " don", 944: "'t", 1414: " know", 894: " any", 5392: " tool", 2765: " won", 17453: "Done"},
            **{35744: "increment", 16252: " increment", 450: "de", 13477: "crement", 927: "sh", 411: "out"},
            **{9520: "step", 1318: "text", 6023: "hi", 95642: '"}}\n', 14172: "tool", 6659: "call"},
            **{397: ">\n", 522: "</"},
        },
    ),
}
"""``qwen`` has Qwen's numbers for what tests write as numbers; with ``small`` generating is many times faster."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_HEADS = {"num_attention_heads": 4, "num_hidden_layers": 2}
_SIZES = {**_HEADS, "hidden_size": 8, "num_key_value_heads": 2, "intermediate_size": 32}
_WIDER = {**_SIZES, "hidden_size": 16, "num_labels": 1}
_EXPERTS = {**_SIZES, "num_experts_per_tok": 2}

_CAUSAL, _CLASSES, _SEQ2SEQ = "CausalLM", "SequenceClassification", "Seq2SeqLM"
_FOR_VLLM = {**_HEADS, "hidden_size": 128, "num_key_value_heads": 2, "intermediate_size": 64}
"""vLLM's kernels for CPUs need heads of 32 or more."""

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Qwen/Qwen2.5-0.5B-Instruct": (_CAUSAL, "qwen2", _FOR_VLLM),
    "Qwen/Qwen2.5-1.5B": (_CAUSAL, "qwen2", _FOR_VLLM),
    "tiny-BartModel": (
        _SEQ2SEQ,
        "bart",
        {
            **{"d_model": 8, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4},
            **{"decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32},
        },
    ),
    "tiny-BloomForCausalLM": (_CAUSAL, "bloom", {"hidden_size": 8, "n_layer": 2, "n_head": 4}),
    "tiny-Cohere2ForCausalLM": (_CAUSAL, "cohere2", {**_SIZES, "logit_scale": 1.0}),
    "tiny-CohereForCausalLM": (_CAUSAL, "cohere", {**_SIZES, "logit_scale": 1.0}),
    "tiny-GPT2LMHeadModel": (_CAUSAL, "gpt2", {"n_embd": 8, "n_layer": 2, "n_head": 4}),
    "tiny-GPTNeoXForCausalLM": (_CAUSAL, "gpt_neox", {**_HEADS, "hidden_size": 8, "intermediate_size": 32}),
    "tiny-Gemma2ForCausalLM": (_CAUSAL, "gemma2", _SIZES),
    "tiny-GemmaForCausalLM": (_CAUSAL, "gemma", _SIZES),
    "tiny-Glm4MoeForCausalLM": (
        _CAUSAL,
        "glm4_moe",
        {**_EXPERTS, "n_routed_experts": 4, "moe_intermediate_size": 32, "head_dim": 2, "first_k_dense_replace": 1},
    ),
    "tiny-GptOssForCausalLM": (_CAUSAL, "gpt_oss", {**_EXPERTS, "num_local_experts": 4}),
    "tiny-LlamaForCausalLM-3": (_CAUSAL, "llama", _SIZES),
    "tiny-LlamaForCausalLM-3.1": (_CAUSAL, "llama", _SIZES),
    "tiny-LlamaForCausalLM-3.2": (_CAUSAL, "llama", _SIZES),
    "tiny-LlamaForSequenceClassification-3.2": (_CLASSES, "llama", _WIDER),
    "tiny-MistralForCausalLM-0.1": (_CAUSAL, "mistral", _SIZES),
    "tiny-MistralForCausalLM-0.2": (_CAUSAL, "mistral", _SIZES),
    "tiny-NemotronHForCausalLM-nano": (
        _CAUSAL,
        "nemotron_h",
        {
            **{"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32},
            **{"layers_block_type": ["mamba", "attention", "moe"], "mamba_num_heads": 8, "mamba_head_dim": 4},
            **{"mamba_n_groups": 1, "ssm_state_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2},
            **{"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32, "use_mamba_kernels": False},
        },
    ),
    "tiny-OPTForCausalLM": (
        _CAUSAL,
        "opt",
        {**_HEADS, "hidden_size": 8, "ffn_dim": 32, "word_embed_proj_dim": 8},
    ),
    "tiny-Phi3ForCausalLM-3": (_CAUSAL, "phi3", _SIZES),
    "tiny-Phi3ForCausalLM-3.5": (_CAUSAL, "phi3", _SIZES),
    "tiny-Qwen2ForCausalLM-2.5": (_CAUSAL, "qwen2", _SIZES),
    "tiny-Qwen2ForSequenceClassification-2.5": (_CLASSES, "qwen2", _WIDER),
    "tiny-Qwen3ForCausalLM": (_CAUSAL, "qwen3", _SIZES),
    "tiny-Qwen3ForSequenceClassification": (_CLASSES, "qwen3", _WIDER),
    "tiny-Qwen3MoeForCausalLM": (_CAUSAL, "qwen3_moe", {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 32}),
    "tiny-RemoteForCausalLM": (_CAUSAL, "llama", _SIZES),
    "tiny-T5ForConditionalGeneration": (
        _SEQ2SEQ,
        "t5",
        {"d_model": 8, "d_kv": 2, "d_ff": 32, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
    ),
}
"""Name to the kind of head, Transformers' type of the model, and its sizes."""

_REMOTE_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class RemoteConfig(LlamaConfig):
    model_type = "remote"


class RemoteForCausalLM(LlamaForCausalLM):
    config_class = RemoteConfig
"""


def new_tokenizer(vocabulary: Vocabulary, chat_template: str) -> Any:
    """A tokenizer that splits text into bytes; words it knows only to decode them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    # As all byte-level tokenizers: a byte that cannot be printed is written as a letter from 256 on.
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}
    known = {number: letters[byte] for number, byte in enumerate([*printable, *others])}
    known |= {number: "".join(letters[byte] for byte in word.encode()) for number, word in vocabulary.words.items()}
    known |= zip(vocabulary.tokens, _TOKENS, strict=True)
    numbers = {known.get(number, f"<|unused {number}|>"): number for number in range(vocabulary.size)}
    tokenizer = Tokenizer(models.BPE(numbers, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # Only what is no part of the text is special, as Qwen has it.
    tokenizer.add_tokens([AddedToken(text, special=text.startswith("<|"), normalized=False) for text in _TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_input_names=["input_ids", "attention_mask"],  # no token types: no model here knows them
        eos_token=_TOKENS[1],
        pad_token=_TOKENS[0],
        chat_template=chat_template,
    )


def new_model(vocabulary: Vocabulary, kind: str, model_type: str, sizes: dict[str, Any]) -> Any:
    """A model with random weights, in float32 on the CPU.

    Raises:
        ValueError: this release of Transformers does not know the type.
    """
    import torch
    import transformers

    pad, eos, *_ = vocabulary.tokens
    tokens = {"pad_token_id": pad, "bos_token_id": pad, "eos_token_id": eos}
    config = transformers.AutoConfig.for_model(model_type, vocab_size=vocabulary.size, **tokens, **sizes)
    torch.manual_seed(0)
    model = getattr(transformers, f"AutoModelFor{kind}").from_config(config)
    for module in model.modules():
        # Wide enough for the tests' few steps: gradients of the usual small weights round to nothing.
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.xavier_uniform_(module.weight)
    return model


def full_name(name: str) -> str:
    """Of a model on the Hub."""
    return name if "/" in name else f"{ORGANISATION}/{name}"


def save(name: str, vocabulary: Vocabulary, cache: Path) -> None:
    """Save a model and its tokenizer where the Hub's cache has them."""
    repository = cache / f"models--{full_name(name).replace('/', '--')}"
    folder = repository / "snapshots" / REVISION
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(REVISION)
    new_model(vocabulary, *MODELS[name]).save_pretrained(folder)
    if name == "tiny-RemoteForCausalLM":
        (folder / "remote.py").write_text(_REMOTE_CODE)
        config = json.loads((folder / "config.json").read_text())
        classes = {"AutoConfig": "RemoteConfig", "AutoModelForCausalLM": "RemoteForCausalLM"}
        config |= {"model_type": "remote", "auto_map": {auto: f"remote.{own}" for auto, own in classes.items()}}
        config["architectures"] = ["RemoteForCausalLM"]
        (folder / "config.json").write_text(json.dumps(config))
    new_tokenizer(vocabulary, _chat_template(name)).save_pretrained(folder)


def _chat_template(name: str) -> str:
    """Newer releases train with tools by templates that they know, and bring along."""
    import trl

    known = "qwen3.jinja" if "Qwen3" in name else "qwen2_5.jinja" if name.startswith("Qwen/") else None
    bundled = Path(trl.__file__).parent / "chat_templates" / str(known)
    return bundled.read_text() if bundled.exists() else CHAT_TEMPLATE


def main(arguments: Sequence[str]) -> None:
    cache, vocabulary, *names = arguments
    for name in names:
        try:
            save(name, VOCABULARIES[vocabulary], Path(cache))
        except ValueError as error:
            print(f"{name} is not made: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
