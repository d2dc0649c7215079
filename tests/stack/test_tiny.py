"""Tiny models: the same weights everywhere, real layers, and folders that every release reloads."""

from __future__ import annotations

import hashlib
import inspect
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
from pytest_trlcompat.tiny import ArchitectureAbsent, TinyModel

from .checks_bodies import forgive_trl

# Of names and float32 bytes of all parameters, as a checkpoint has them, seed 3; the same on every Transformers.
DIGESTS = {
    "qwen2": "10a49bd3436c",
    "mistral": "eac8f932b0a2",
    "llama": "eac8f932b0a2",  # a Mistral without a sliding window
    "gemma": "1ad0c841d50e",
    "qwen3_moe": "6c38281901fb",
    "qwen2_vl": "13387e7e46ed",
}
# Of the last position of a batch, seed 3, in float32.
LAST_LOGITS_STD = {"qwen2": 0.121159, "mistral": 0.121619, "gemma": 0.131842, "qwen3_moe": 0.118345}
ARCHITECTURES = list(DIGESTS)


@pytest.fixture(params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    """Each that the installed Transformers has."""
    try:
        TinyModel(architecture=request.param).check_present()
    except ArchitectureAbsent as error:
        pytest.skip(str(error))
    return str(request.param)


def auto_class(architecture: str) -> Any:
    if architecture != "qwen2_vl":
        return transformers.AutoModelForCausalLM
    return transformers.AutoModelForImageTextToText


def some_inputs(small: TinyModel) -> dict[str, torch.Tensor]:
    """Token ids, with an image of 16 by 16 pixels for a vision model: what its processor would make."""
    if small.architecture != "qwen2_vl":
        ids = torch.tensor([[3, 9, 12, 60, 7, 5]])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    start, end, image = (small.vocab_size - places for places in (4, 3, 2))
    ids = torch.tensor([[3, start, *[image] * 4, end, 9, 12, 5]])
    pixels = torch.rand(16, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(0))
    inputs = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]])}
    if "mm_token_type_ids" in inspect.signature(small.model.forward).parameters:  # from Transformers 5 on
        inputs["mm_token_type_ids"] = (ids == image).int()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **inputs}


def digest(model: Any) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tiny.checkpoint_tensors(model).items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()[:12]


def same_tensors(left: Any, right: Any) -> bool:
    left, right = left.state_dict(), right.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


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
    sizes: dict[str, Any] = {
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


def test_every_parameter_is_random_and_gets_a_gradient(architecture: str) -> None:
    small = TinyModel(architecture=architecture, num_experts=2)  # every expert is reached
    inputs = some_inputs(small)
    small.model(**inputs, labels=inputs["input_ids"]).loss.backward()
    for name, parameter in small.model.named_parameters():
        norm = "norm" in name or "ln_q" in name
        centre = 1.0 if norm and name.endswith("weight") and architecture != "gemma" else 0.0
        assert 0.01 < parameter.std() < 0.03, name  # 0.02 is requested
        assert abs(parameter.mean() - centre) < 0.02, name
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("architecture", LAST_LOGITS_STD, indirect=True)
def test_the_same_weights_compute_the_same_on_every_release(architecture: str) -> None:
    model = TinyModel(architecture=architecture, seed=3).model
    ids = torch.tensor([[3, 4, 5, 9], [0, 0, 7, 8]])
    logits = model(input_ids=ids, attention_mask=(ids != 0).long()).logits
    assert logits.shape == (2, 4, 64)
    assert logits[-1, -1].std().item() == pytest.approx(LAST_LOGITS_STD[architecture], abs=2e-6)


def test_generation_begins_with_the_likeliest_token(architecture: str) -> None:
    small = TinyModel(architecture=architecture, initializer_range=0.2)
    inputs = some_inputs(small)
    generated = small.model.generate(**inputs, max_new_tokens=3, do_sample=False)
    length = inputs["input_ids"].shape[1]
    assert generated.shape[1] == length + 3 or generated[0, -1] == tiny.EOS_TOKEN_ID
    assert generated[0, length] == small.model(**inputs).logits[0, -1].argmax()


def test_an_image_matters(tiny_vlm: Callable[..., TinyModel]) -> None:
    small = tiny_vlm(initializer_range=0.2)
    inputs = some_inputs(small)
    logits = small.model(**inputs).logits[0, -1]
    inputs["pixel_values"] = inputs["pixel_values"].flip(0)
    assert (small.model(**inputs).logits[0, -1] - logits).abs().max() > 1e-3


def test_a_built_model_names_the_folder_from_which_it_can_be_loaded_again(tmp_path: Path) -> None:
    """As TRL does with the policy's name for its reference model."""
    small = tiny.gemma(directory=tmp_path)
    for model in (small.model, small.new_model()):
        assert model.config._name_or_path == model.name_or_path == str(small.path)
        assert same_tensors(transformers.AutoModelForCausalLM.from_pretrained(model.name_or_path), small.model)
    assert str(tmp_path) not in (small.path / "config.json").read_text()
    assert tiny.gemma().model.name_or_path == "tiny gemma without a directory"


def test_tied_embeddings_are_one_parameter_and_survive_saving(tmp_path: Path) -> None:
    tied = tiny.qwen2(tie_word_embeddings=True, directory=tmp_path)
    assert tied.model.lm_head.weight is tied.model.model.embed_tokens.weight
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tied.path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert same_tensors(loaded, tied.model)


def test_what_was_saved_is_reloaded_bitwise_by_the_auto_classes(architecture: str, tmp_path: Path) -> None:
    small = TinyModel(architecture=architecture, directory=tmp_path)
    model = auto_class(architecture).from_pretrained(small.path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(small.path)
    assert type(model) is type(small.model)
    assert same_tensors(model, small.model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    if architecture != "qwen2_vl":  # of which some releases do not read it
        assert model.config._attn_implementation == "eager"
    assert model.generation_config.eos_token_id == tiny.EOS_TOKEN_ID
    assert model.generation_config.pad_token_id == tiny.PAD_TOKEN_ID
    batch = ["w0 w56", "w5 nonsense w1 w2"]
    expected = [[0, 0, 3, 59], [8, 2, 4, 5]]
    assert small.tokenizer(batch, padding=True).input_ids == expected
    assert tokenizer(batch, padding=True).input_ids == expected
    assert (tokenizer.padding_side, tokenizer.pad_token_id, tokenizer.eos_token_id) == ("left", 0, 1)
    assert tokenizer.decode([3, 59, 1], skip_special_tokens=True) == "w0 w56"


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

    monkeypatch.setattr("safetensors.torch.save_file", full)
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
        ({"architecture": "bert"}, "unknown architecture 'bert'; choose one of qwen2, mistral, llama, gemma"),
        ({"vocab_size": 3}, "vocab_size=3 leaves no words besides 3 special tokens"),
        ({"architecture": "qwen2_vl", "vocab_size": 7}, "vocab_size=7 leaves no words besides 7 special tokens"),
        (
            {"architecture": "qwen2_vl", "hidden_size": 16},
            "hidden_size=16 gives 4 heads of 4, and a vision model needs",
        ),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok=5 is not between 1 and num_experts=4"),
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


@pytest.mark.parametrize("name", ["qwen2", "mistral", "llama", "gemma", "moe", "vlm"])
def test_each_fixture_gives_its_own_architecture(name: str, request: pytest.FixtureRequest) -> None:
    small = request.getfixturevalue(f"tiny_{name}")()
    assert small.architecture == {"moe": "qwen3_moe", "vlm": "qwen2_vl"}.get(name, name)
    assert json.loads((small.path / "config.json").read_text())["model_type"] == small.architecture
    assert small.config.tie_word_embeddings is (name == "gemma")


def train_one_step(small: TinyModel, inputs: dict[str, torch.Tensor], folder: str) -> dict[str, Any]:
    from transformers import Trainer, TrainingArguments

    forgive_trl()
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=1,
        optim="sgd",
        learning_rate=1.0,
        per_device_train_batch_size=1,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        remove_unused_columns=False,
    )

    def collate(rows: list[int]) -> dict[str, torch.Tensor]:
        shifted = (inputs["input_ids"] + rows[0] % 2).where(
            inputs["input_ids"] < small.vocab_size - 5, inputs["input_ids"]
        )
        return {**inputs, "input_ids": shifted, "labels": shifted.clone()}

    model = small.new_model()
    trainer = Trainer(model, arguments, train_dataset=list(range(4)), data_collator=collate)
    trainer.train()
    (entry,) = (entry for entry in trainer.state.log_history if "grad_norm" in entry)
    return {"loss": entry["loss"], "grad_norm": float(entry["grad_norm"])}


@pytest.mark.parametrize("strategy", ["single", "fsdp1"])
def test_a_step_trains_each_architecture(
    strategy: str, architecture: str, launch: Callable[..., Any], tmp_path: Path
) -> None:
    small = TinyModel(architecture=architecture, directory=tmp_path)
    result = launch(train_one_step, small, some_inputs(small), str(tmp_path), strategy=strategy)
    for values in result.values:
        assert 3.3 < values["loss"] < 4.4  # log(64) is 4.16; up to 4.48 divided by a token more than has a label
        assert 0.05 < values["grad_norm"] < 50
    assert len({values["grad_norm"] for values in result.values}) == 1


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
    with pytest.raises(ValueError, match=r"^words=\(4, 2\) is neither the length of a text"):
        tiny.prompts(words=(4, 2))


def all_known(texts: list[str]) -> bool:
    tokenizer = tiny.qwen2().tokenizer
    return all(tiny.UNK_TOKEN_ID not in tokenizer(text).input_ids for text in texts)


def test_conversations_alternate_between_user_and_assistant(conversations: Any) -> None:
    assert conversations.column_names == ["messages"]
    assert conversations["messages"][:2] == [
        [{"content": "w0 w1", "role": "user"}, {"content": "w2 w3 w4", "role": "assistant"}],
        [
            {"content": "w5 w6 w7 w8", "role": "user"},
            {"content": "w9 w10", "role": "assistant"},
            {"content": "w11 w12 w13", "role": "user"},
            {"content": "w14 w15 w16 w17", "role": "assistant"},
        ],
    ]
    assert [len(row) for row in conversations["messages"]] == [2, 4] * 8
    assert all_known([message["content"] for row in tiny.conversations(100)["messages"] for message in row])
    assert {len(row) for row in tiny.conversations(turns=3)["messages"]} == {6}
    with pytest.raises(ValueError, match=r"^turns=0 is neither the length of a conversation nor a pair"):
        tiny.conversations(turns=0)


def test_preferences_have_two_completions_that_differ(preferences: Any) -> None:
    assert preferences.column_names == ["prompt", "chosen", "rejected"]
    assert preferences[0] == {"prompt": "w0 w1", "chosen": "w2 w3 w4", "rejected": "w5 w6 w7 w8"}
    assert all(row["chosen"].split()[0] != row["rejected"].split()[0] for row in tiny.preferences(200))
    assert all_known([text for row in tiny.preferences(100) for text in row.values()])
    assert tiny.preferences(1, words=1, conversational=True)[0] == {
        "prompt": [{"content": "w0", "role": "user"}],
        "chosen": [{"content": "w1", "role": "assistant"}],
        "rejected": [{"content": "w2", "role": "assistant"}],
    }


def test_every_other_unpaired_completion_is_liked(unpaired_preferences: Any) -> None:
    assert unpaired_preferences.column_names == ["prompt", "completion", "label"]
    assert unpaired_preferences[1] == {"prompt": "w5 w6 w7 w8", "completion": "w9 w10", "label": False}
    assert unpaired_preferences["label"][:] == [True, False] * 8
    assert tiny.unpaired_preferences(1, words=1, conversational=True)[0] == {
        "prompt": [{"content": "w0", "role": "user"}],
        "completion": [{"content": "w1", "role": "assistant"}],
        "label": True,
    }
