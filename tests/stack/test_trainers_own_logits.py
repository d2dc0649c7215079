"""The cure of logits that TRL's fused head computes otherwise than the model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pytest_trlcompat import stack, tiny
from pytest_trlcompat.conformance.architectures import architecture
from pytest_trlcompat.trainers.logprobs.own_logits import _STATE, OwnLogitsMixin, _checking, _is_head_alone

if TYPE_CHECKING:
    from pytest_trlcompat.launch import Launcher

pytestmark = pytest.mark.skipif(
    not stack.satisfied({"trl": ">=1.16"}, stack.installed()), reason="TRL gives models a fused head, without Triton"
)

MODEL = tiny.qwen2(initializer_range=0.5, num_hidden_layers=1)
OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
IDS = torch.tensor([[5, 6, 7, 8, 9], [7, 8, 9, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
LABELS = IDS.masked_fill(MASK == 0, -100)


def with_head(model: Any, **settings: Any) -> Any:
    from trl.trainer.utils import add_fused_lm_head

    _checking(add_fused_lm_head)(model, outputs=OUTPUTS, **settings)
    return model


def asked(model: Any, **more: Any) -> Any:
    return model(input_ids=IDS, attention_mask=MASK, labels=LABELS, fused_lm_head=True, **more)


def of_name(name: str) -> Any:
    return architecture(name, tiny.qwen2())


def test_a_model_whose_logits_are_the_head_of_a_hidden_state_is_left_as_it_is() -> None:
    model = with_head(tiny.qwen2().model)
    assert _is_head_alone(type(model))
    asked(model)
    assert (vars(model)[_STATE].differs, vars(model)[_STATE].is_unread) == (False, False)


def test_where_the_fused_head_knows_what_a_model_does_it_stays() -> None:
    for name in ("granite", "cohere", "gemma2", "phi"):
        model = with_head(of_name(name))
        if _STATE in vars(model):
            asked(model)
            assert vars(model)[_STATE].differs is False, name


def test_a_head_that_is_more_than_a_matrix_is_not_taken_for_one() -> None:
    from transformers import RobertaConfig, RobertaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = RobertaForCausalLM(RobertaConfig(**sizes, num_hidden_layers=1, is_decoder=True)).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3)
    right = model(input_ids=IDS, attention_mask=MASK).logits[:, :-1].log_softmax(-1)
    output = asked(with_head(model))
    assert vars(model)[_STATE].differs is True
    assert torch.allclose(output.log_probs[0], right[0].gather(-1, IDS[0, 1:, None]).squeeze(-1), atol=1e-5)


def test_a_layer_before_the_head_is_applied() -> None:
    model = of_name("modernbert")
    right = model(input_ids=IDS, attention_mask=MASK).logits[:, :-1].log_softmax(-1)
    wanted = right.gather(-1, IDS[:, 1:, None]).squeeze(-1).masked_fill(LABELS[:, 1:] == -100, 0.0)
    output = asked(with_head(model))
    assert vars(model)[_STATE].differs is True
    assert torch.allclose(output.log_probs, wanted, atol=1e-5)
    assert float(output.loss) == pytest.approx(float(-wanted.sum() / 6), rel=1e-5)
    assert float(asked(model, num_items_in_batch=3).loss) == pytest.approx(float(-wanted.sum() / 3), rel=1e-5)
    output.loss.backward()
    assert float(model.lm_head.dense.weight.grad.abs().sum()) > 0
    assert torch.equal(model(input_ids=IDS, attention_mask=MASK).logits[:, :-1].log_softmax(-1), right)


def test_tied_embeddings_with_rows_of_an_adapter_s_own_are_not_read_as_a_matrix() -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["q_proj"], trainable_token_indices=[7, 8], task_type="CAUSAL_LM")
    model = get_peft_model(with_head(tiny.qwen2(tie_word_embeddings=True).model), config)
    (rows,) = (each for name, each in model.named_parameters() if "trainable_tokens_delta" in name)
    with torch.no_grad():
        rows.add_(0.5)
    right = model(input_ids=IDS, attention_mask=MASK).logits[:, :-1].log_softmax(-1)
    wanted = right.gather(-1, IDS[:, 1:, None]).squeeze(-1).masked_fill(LABELS[:, 1:] == -100, 0.0)
    (gradient,) = torch.autograd.grad(-wanted.sum() / 6, rows)
    output = asked(model)
    assert vars(model.get_base_model())[_STATE].is_unread
    assert torch.allclose(output.log_probs, wanted, atol=1e-5)
    assert torch.allclose(torch.autograd.grad(output.loss, rows)[0], gradient, atol=1e-6)


def gradient_of_saved_head(model: Any, cured: bool) -> float:
    """The norm over all ranks, each of which has one row of its own."""
    import torch
    from accelerate import Accelerator
    from peft import LoraConfig, get_peft_model
    from trl.trainer.utils import add_fused_lm_head

    from pytest_trlcompat.trainers.logprobs.own_logits import _checking

    accelerator, policy = Accelerator(), model.new_model()
    (_checking(add_fused_lm_head) if cured else add_fused_lm_head)(policy)
    policy = get_peft_model(policy, LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    policy, _ = accelerator.prepare(policy, torch.optim.SGD(policy.parameters()))
    rows = torch.tensor([[5, 6, 7, 8], [20, 30, 40, 50]], device=accelerator.device)
    if accelerator.num_processes > 1:
        rows = rows[accelerator.process_index][None]
    accelerator.backward(policy(input_ids=rows, labels=rows, fused_lm_head=True).loss)
    (head,) = (each for name, each in policy.named_parameters() if "modules_to_save" in name)
    gradient = head.grad.full_tensor() if hasattr(head.grad, "full_tensor") else head.grad
    return float(gradient.norm())


def test_a_trained_head_that_fsdp2_shards_by_itself_gets_the_gradient_of_all_ranks(launch: Launcher) -> None:
    def norm(strategy: str, cured: bool) -> float:
        return float(launch(gradient_of_saved_head, MODEL, cured, strategy=strategy).values[0])

    right = norm("single", cured=False)
    assert norm("fsdp2", cured=True) == pytest.approx(right, rel=1e-4)
    assert norm("fsdp2", cured=False) > 1.2 * right


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("shifted", [False, True])
def test_what_it_returns_is_what_the_fused_head_returns(temperature: float, shifted: bool) -> None:
    def output(differs: bool) -> Any:
        model = with_head(of_name("granite"), temperature=temperature)
        vars(model)[_STATE].differs = differs
        if not shifted:
            return asked(model)
        labels = torch.cat([LABELS[:, 1:], torch.full((2, 1), -100)], 1)
        return model(input_ids=IDS, attention_mask=MASK, shift_labels=labels, fused_lm_head=True)

    fused, own = output(False), output(True)
    assert list(fused) == list(own)
    for name in fused:
        assert torch.allclose(fused[name].float(), own[name].float(), atol=1e-5), name
        assert fused[name].requires_grad == own[name].requires_grad, name


def test_dropout_is_no_difference() -> None:
    model = of_name("granite").train()
    model.config.attention_dropout = 0.5
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    asked(with_head(model))
    assert vars(model)[_STATE].differs is False
    assert model.training


def test_generation_still_validates_what_it_passes() -> None:
    model = with_head(of_name("modernbert"))
    generated = model.generate(input_ids=IDS[:1], attention_mask=MASK[:1], max_new_tokens=2, do_sample=False)
    assert generated.shape[1] > IDS.shape[1]
    with pytest.raises(ValueError, match="nonsense"):
        model.generate(input_ids=IDS[:1], nonsense=1)


def test_it_says_what_it_has_seen() -> None:
    from trl import SFTTrainer

    mine: Any = type("Mine", (OwnLogitsMixin, SFTTrainer), {})
    model = with_head(of_name("modernbert"))
    trainer = SimpleNamespace(model=model)
    assert OwnLogitsMixin._activity(mine, None).active is None
    assert OwnLogitsMixin._activity(mine, trainer).active is None
    asked(model)
    assert OwnLogitsMixin._activity(mine, trainer).active is True
    assert OwnLogitsMixin._activity(mine, SimpleNamespace(model=tiny.qwen2().model)).active is False


def saved_model(folder: str) -> float:
    """In a rank: save a ModernBertDecoder, and return the mean of its losses over the tokens of :data:`ROWS`."""
    model = of_name("modernbert")
    model.save_pretrained(folder)
    ids = torch.tensor(ROWS)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, :-1]
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))


def first_loss(folder: str, output: str, words: tiny.TinyModel, world_size: int) -> tuple[float, bool | None]:
    """In a rank: the loss of a step of SFT on all rows, and whether the cure says that it is at work."""
    from datasets import Dataset
    from trl import SFTConfig

    from pytest_trlcompat.trainers import SFTTrainer

    arguments = SFTConfig(
        output_dir=output,
        per_device_train_batch_size=len(ROWS) // world_size,
        max_steps=1,
        learning_rate=0.0,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    data = Dataset.from_dict({"input_ids": ROWS})
    trainer: Any = SFTTrainer(model=folder, args=arguments, train_dataset=data, processing_class=words.tokenizer)
    trainer.train()
    (loss,) = (each["loss"] for each in trainer.state.log_history if "loss" in each)
    (status,) = (each for each in trainer.cures if each.name == "OwnLogitsMixin")
    return float(loss), status.active


ROWS = [[5, 6, 7, 8, 9], [6, 8, 10, 12, 14], [7, 7, 9, 9, 11], [12, 11, 10, 9, 8]]


@pytest.mark.parametrize("strategy", ["single", "ddp", "zero2", "zero3", "fsdp1", "fsdp2"])
def test_a_training_with_ranks_has_the_loss_of_the_models_own_logits(
    launcher: Launcher, tmp_path: Path, strategy: str
) -> None:
    folder, size = str(tmp_path / "model"), 1 if strategy == "single" else 2
    (wanted,) = launcher(saved_model, folder, strategy="single").values
    words = tiny.qwen2()
    found = launcher(first_loss, folder, str(tmp_path), words, size, strategy=strategy, world_size=size, timeout=100)
    for loss, active in found.values:
        assert loss == pytest.approx(wanted, rel=1e-3)
        assert active is True
