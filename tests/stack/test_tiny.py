"""Tiny models: the same weights everywhere, real layers, and folders that every release reloads."""

from __future__ import annotations

import hashlib
import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers

from pytest_trlcompat import tiny
from pytest_trlcompat.tiny import TinyModel

# Of names and float32 bytes of all parameters, seed 3; the same on Transformers 4.45 to 5.23.
DIGESTS = {"qwen2": "c644b4d7cceb", "mistral": "04785bccb06e"}
ARCHITECTURES = list(DIGESTS)


def digest(model: Any) -> str:
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode() + parameter.detach().numpy().tobytes())
    return digest.hexdigest()[:12]


def same_tensors(left: Any, right: Any) -> bool:
    left, right = left.state_dict(), right.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_seed_gives_the_same_bytes_on_every_release(architecture: str) -> None:
    assert digest(TinyModel(architecture=architecture, seed=3).model) == DIGESTS[architecture]
    assert digest(TinyModel(architecture=architecture, seed=4).model) != DIGESTS[architecture]


def test_the_random_state_neither_matters_nor_changes() -> None:
    digests = set()
    for seed in (1, 2):
        torch.manual_seed(seed), random.seed(seed), numpy.random.seed(seed)
        before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
        digests.add(digest(tiny.qwen2(seed=3).model))
        after = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
        assert torch.equal(before[0], after[0])
        assert before[1:] == after[1:]
    assert digests == {DIGESTS["qwen2"]}


def test_defaults_that_the_caller_set_for_dtype_and_device_do_not_matter() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = tiny.qwen2(seed=3).model
    finally:
        torch.set_default_dtype(torch.float32)
    assert digest(model) == DIGESTS["qwen2"]
    logits = model(input_ids=torch.tensor([[3, 4, 5]])).logits
    assert torch.equal(logits, tiny.qwen2(seed=3).model(input_ids=torch.tensor([[3, 4, 5]])).logits)


def test_the_layers_are_the_real_ones_in_the_requested_sizes() -> None:
    sizes = {
        "vocab_size": 50,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "max_position_embeddings": 77,
    }
    for small, biased in ((tiny.qwen2(**sizes), True), (tiny.mistral(**sizes), False)):
        model = small.model
        assert {type(layer).__name__ for layer in model.model.layers} == {small.decoder_layer}
        assert len(model.model.layers) == 3
        attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
        assert tuple(attention.q_proj.weight.shape) == (48, 48)
        assert tuple(attention.k_proj.weight.shape) == tuple(attention.v_proj.weight.shape) == (24, 48)
        assert (attention.q_proj.bias is not None) is biased
        assert tuple(mlp.gate_proj.weight.shape) == (40, 48)
        assert tuple(model.lm_head.weight.shape) == tuple(model.model.embed_tokens.weight.shape) == (50, 48)
        assert model.config.max_position_embeddings == 77
        assert model.config._attn_implementation == "eager"
        assert not model.training
        assert model(input_ids=torch.tensor([[3, 4, 5]])).logits.shape == (1, 3, 50)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_parameter_is_random_and_gets_a_gradient(architecture: str) -> None:
    model = TinyModel(architecture=architecture).model
    ids = torch.tensor([[3, 9, 12, 60, 7, 5]])
    model(input_ids=ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        centre = 1.0 if "norm" in name else 0.0
        assert 0.01 < parameter.std() < 0.03, name  # 0.02 is requested
        assert abs(parameter.mean() - centre) < 0.02, name
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_tied_embeddings_are_one_parameter_and_survive_saving(tmp_path: Path) -> None:
    tied = tiny.qwen2(tie_word_embeddings=True, directory=tmp_path)
    assert tied.model.lm_head.weight is tied.model.model.embed_tokens.weight
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tied.path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert same_tensors(loaded, tied.model)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_was_saved_is_reloaded_bitwise_by_the_auto_classes(architecture: str, tmp_path: Path) -> None:
    small = TinyModel(architecture=architecture, directory=tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(small.path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(small.path)
    assert type(model) is type(small.model)
    assert same_tensors(model, small.model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config._attn_implementation == "eager"
    assert model.generation_config.eos_token_id == tiny.EOS_TOKEN_ID
    assert model.generation_config.pad_token_id == tiny.PAD_TOKEN_ID
    batch = ["w0 w60", "w5 nonsense w1 w2"]
    expected = [[0, 0, 3, 63], [8, 2, 4, 5]]
    assert small.tokenizer(batch, padding=True).input_ids == expected
    assert tokenizer(batch, padding=True).input_ids == expected
    assert (tokenizer.padding_side, tokenizer.pad_token_id, tokenizer.eos_token_id) == ("left", 0, 1)
    assert tokenizer.decode([3, 63, 1], skip_special_tokens=True) == "w0 w60"


def test_a_tokenizer_that_was_saved_again_is_still_ours(tmp_path: Path) -> None:
    """As a trainer does with a checkpoint."""
    small = tiny.qwen2(directory=tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(small.path)
    for number, each in enumerate((small.tokenizer, tokenizer)):
        folder = tmp_path / f"checkpoint-{number}"
        small.model.save_pretrained(folder)
        each.save_pretrained(folder)
        assert transformers.AutoTokenizer.from_pretrained(folder)("w0 w1").input_ids == [3, 4]


def test_the_chat_template_ends_each_message(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]
    tokenizer = tiny.qwen2().tokenizer
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer(text).input_ids == [4, 5, 1, 6, 1]


def test_equal_models_share_a_folder_and_others_do_not(tmp_path: Path) -> None:
    first, second = tiny.qwen2(directory=tmp_path), tiny.qwen2(directory=tmp_path)
    with torch.no_grad():
        first.model.lm_head.weight.zero_()  # trained since: not what path promises
    assert first == second
    assert first.path == second.path
    loaded = transformers.AutoModelForCausalLM.from_pretrained(first.path)
    assert same_tensors(loaded, second.model)
    assert tiny.qwen2(directory=tmp_path, seed=1).path != first.path
    assert sorted(path.name[0] for path in tmp_path.iterdir()) == ["q", "q"]  # no temporary folder is left


def test_of_two_processes_that_save_at_once_the_slower_one_takes_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny.qwen2(directory=tmp_path).path
    written = (path / "model.safetensors").stat().st_mtime_ns
    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", lambda _: False)  # what the slower one saw before it began to save
        assert tiny.qwen2(directory=tmp_path).path == path
    assert (path / "model.safetensors").stat().st_mtime_ns == written
    assert list(tmp_path.iterdir()) == [path]


def test_half_a_folder_is_never_seen_and_a_failed_save_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def full(*_: object, **__: object) -> None:
        seen.extend(path.name for path in tmp_path.iterdir())
        raise OSError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save_model", full)
    small = tiny.qwen2(directory=tmp_path)
    with pytest.raises(OSError, match="No space left"):
        _ = small.path
    (temporary,) = seen
    assert temporary.startswith(".qwen2-")
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_a_directory_has_no_path() -> None:
    with pytest.raises(ValueError, match="^a tiny model without a directory has no path; give one: "):
        _ = tiny.qwen2().path


def test_what_travels_is_the_description(tmp_path: Path) -> None:
    small = tiny.mistral(seed=3, directory=tmp_path)
    assert small.model is small.model
    assert small.new_model() is not small.model
    sent = pickle.dumps(small)
    assert len(sent) < 1000
    received = pickle.loads(sent)
    assert received == small
    assert received.directory == tmp_path
    assert digest(received.model) == DIGESTS["mistral"]


def rebuild_and_save(small: TinyModel, folder: str) -> tuple[str, str]:
    from accelerate import PartialState
    from transformers import AutoModelForCausalLM

    own = Path(folder) / str(PartialState().process_index)
    small.save(own)
    return digest(small.model), digest(AutoModelForCausalLM.from_pretrained(own))


def test_every_rank_rebuilds_the_same_model_and_can_save_it(
    tiny_qwen2: Callable[..., TinyModel], launcher: Callable[..., Any], tmp_path: Path
) -> None:
    result = launcher(rebuild_and_save, tiny_qwen2(seed=3), str(tmp_path), strategy="ddp", sharded=False)
    assert result.values == [(DIGESTS["qwen2"], DIGESTS["qwen2"])] * 2


@pytest.mark.parametrize(
    "sizes, text",
    [
        ({"architecture": "llama"}, "unknown architecture 'llama'; choose one of qwen2, mistral"),
        ({"vocab_size": 3}, "vocab_size=3 leaves no words besides 3 special tokens"),
        ({"hidden_size": 36}, "hidden_size=36 does not split into 4 heads of an even size"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
    ],
)
def test_sizes_that_make_no_layers_are_refused(sizes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text}"):
        TinyModel(**{"architecture": "qwen2", **sizes})


def test_fixtures_give_models_with_a_folder(
    tiny_qwen2: Callable[..., TinyModel], tiny_mistral: Callable[..., TinyModel], tmp_path: Path
) -> None:
    assert json.loads((tiny_qwen2().path / "config.json").read_text())["model_type"] == "qwen2"
    assert json.loads((tiny_mistral(num_hidden_layers=1).path / "config.json").read_text())["num_hidden_layers"] == 1
    assert tiny_qwen2(directory=tmp_path).path.parent == tmp_path


def test_prompts_are_known_words_of_different_lengths(prompts: Any) -> None:
    assert prompts.column_names == ["prompt"]
    assert prompts["prompt"][:4] == ["w0 w1 w2", "w3 w4 w5 w6", "w7 w8 w9 w10 w11", "w12 w13 w14 w15 w16 w17"]
    assert len(prompts) == 16
    tokenizer = tiny.qwen2().tokenizer
    assert all(tiny.UNK_TOKEN_ID not in tokenizer(row).input_ids for row in tiny.prompts(100)["prompt"])
    assert {len(row.split()) for row in tiny.prompts(5, words=7)["prompt"]} == {7}
    assert {word for row in tiny.prompts(vocab_size=10)["prompt"] for word in row.split()} == {
        f"w{n}" for n in range(7)
    }
    assert len(set(prompts["prompt"])) == 16
    with pytest.raises(ValueError, match=r"^words=\(4, 2\) is neither the length of a prompt"):
        tiny.prompts(words=(4, 2))
