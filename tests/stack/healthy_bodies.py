"""Healthy trainings of many kinds, which the checks must pass without a word. Imports the stack inside functions."""

from __future__ import annotations

from typing import Any

from .checks_bodies import forgive_trl, watch

VOCABULARY = 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
}
STEPS = 5


def language_model(kind: str) -> Any:
    """A tiny model of random weights: dense, a mixture of experts, or one with a vision tower.

    Experts are computed one by one: the CPU, and so the software accelerator, has no kernel for the way in groups.
    """
    model = _language_model(kind)
    if hasattr(model, "set_experts_implementation"):  # Transformers 5
        model.set_experts_implementation("eager")
    return model


def _language_model(kind: str) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if kind == "dense":
        return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, **special))
    if kind == "moe":
        mixture = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
        config = transformers.Qwen3MoeConfig(**SIZES, **special, **mixture, output_router_logits=True)
        return transformers.Qwen3MoeForCausalLM(config)
    if kind == "mixtral":
        config = transformers.MixtralConfig(**SIZES, **special, num_local_experts=8, output_router_logits=True)
        return transformers.MixtralForCausalLM(config)
    if kind == "vision":
        vision = {"depth": 1, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 48}
        text = {**SIZES, **special, "rope_scaling": {"type": "default", "mrope_section": [1, 1, 2]}}
        config = transformers.Qwen2_5_VLConfig(
            text_config=text, vision_config=vision, image_token_id=60, vision_start_token_id=61, vision_end_token_id=62
        )
        return transformers.Qwen2_5_VLForConditionalGeneration(config)
    raise ValueError(kind)


def arguments(cls: Any, folder: str, settings: dict[str, Any]) -> Any:
    forgive_trl()
    values = {
        "output_dir": folder,
        "max_steps": STEPS,
        "logging_steps": 1,
        "save_steps": STEPS,
        "save_strategy": "steps",
        "report_to": "none",
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "bf16": False,
        "disable_tqdm": True,
    }
    return cls(**{**values, **settings})


def rows(count: int = 64, length: int = 12) -> list[dict[str, list[int]]]:
    ids = [[(row * 7 + column * (1 + row % 5)) % 50 + 3 for column in range(length)] for row in range(count)]
    return [{"input_ids": each, "labels": each, "attention_mask": [1] * length} for each in ids]


def plain(
    folder: str,
    kind: str = "dense",
    *,
    frozen: tuple[str, ...] = (),
    lora: dict[str, Any] | None = None,
    dtype: str = "float32",
    merge: bool = False,
    checks: dict[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """A plain ``transformers.Trainer``.

    Args:
        frozen: beginnings or parts of the names of parameters that do not train.
        lora: arguments of LoRA; ``{"freeze_a": True}`` freezes ``lora_A``, as LoRA-FA does, ``name`` names the adapter,
            and ``beside`` another one that does not train, as TRL's DPO has it.
        merge: merge the adapter and unmerge it before each step, as TRL does to hand weights to vLLM.
    """
    import torch
    import transformers

    model = language_model(kind).to(getattr(torch, dtype))
    for name, parameter in model.named_parameters():
        if any(part in name for part in frozen):
            parameter.requires_grad_(False)
    if lora is not None:
        model = adapted(model, dict(lora))
    args = arguments(transformers.TrainingArguments, folder, settings)

    class OneGroup(transformers.Trainer):
        optimizer: Any

        def create_optimizer(self, *unused: Any) -> Any:
            # The usual second group is empty for an adapter, which DeepSpeed drops: deepspeed-empty-param-group.
            if lora is None or self.optimizer is not None:
                return super().create_optimizer(*unused)
            trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            self.optimizer = torch.optim.AdamW(trainable, lr=self.args.learning_rate, weight_decay=0.0)
            return self.optimizer

    trainer = OneGroup(model=model, args=args, train_dataset=rows())
    if getattr(trainer.accelerator, "scaler", None) is not None:
        trainer.accelerator.scaler._init_scale = 2.0**22  # overflows for some steps
    if merge:

        class Merging(transformers.TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                trainer.model.merge_adapter()
                trainer.model.unmerge_adapter()

        trainer.add_callback(Merging())
    return watch(trainer, **(checks or {}))


def adapted(model: Any, lora: dict[str, Any]) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model

    freeze_a, filled = lora.pop("freeze_a", False), lora.pop("filled", False)
    chosen, beside = lora.pop("name", "default"), lora.pop("beside", None)
    config = LoraConfig(r=4, **{"target_modules": ["q_proj", "v_proj"], **lora})
    model = get_peft_model(model, config, adapter_name=chosen)
    if beside is not None:
        model.add_adapter(beside, config)
        model.set_adapter(chosen)
    for name, parameter in model.named_parameters():
        if freeze_a and "lora_A" in name:
            parameter.requires_grad_(False)
        if filled and "lora_B" in name:  # as that of an adapter that has been trained before
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def sft(folder: str, kind: str = "dense", **settings: Any) -> dict[str, Any]:
    import datasets
    import trl

    trainer = trl.SFTTrainer(
        model=language_model(kind),
        args=arguments(trl.SFTConfig, folder, settings),
        train_dataset=datasets.Dataset.from_dict({"text": texts(64)}),
        processing_class=tokenizer(),
    )
    return watch(trainer)


def dpo(folder: str, **settings: Any) -> dict[str, Any]:
    import datasets
    import trl

    pairs = {"prompt": texts(64), "chosen": texts(64, 3), "rejected": texts(64, 7)}
    args = arguments(trl.DPOConfig, folder, {"max_length": 32, **settings})
    trainer = trl.DPOTrainer(
        model=language_model("dense"),
        ref_model=language_model("dense"),
        args=args,
        train_dataset=datasets.Dataset.from_dict(pairs),
        processing_class=tokenizer(),
    )
    return watch(trainer)


def reward(folder: str, **settings: Any) -> dict[str, Any]:
    import datasets
    import torch
    import transformers
    import trl

    torch.manual_seed(0)
    config = transformers.Qwen2Config(**SIZES, num_labels=1, pad_token_id=0)
    pairs = {"prompt": texts(64), "chosen": texts(64, 3), "rejected": texts(64, 7)}
    trainer = trl.RewardTrainer(
        model=transformers.Qwen2ForSequenceClassification(config),
        args=arguments(trl.RewardConfig, folder, {"max_length": 32, **settings}),
        train_dataset=datasets.Dataset.from_dict(pairs),
        processing_class=tokenizer(),
    )
    return watch(trainer)


def grpo(
    folder: str,
    kind: str = "dense",
    *,
    equal_until: int = 0,
    checks: dict[str, Any] | None = None,
    lora: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """GRPO; rewards are all equal in the first ``equal_until`` steps."""
    import datasets
    import trl

    steps: list[Any] = []

    def longer(completions: list[Any], **_: Any) -> list[float]:
        if steps[0].state.global_step < equal_until:
            return [1.0] * len(completions)
        return [float(sum(map(ord, str(text))) % 17) for text in completions]

    values: dict[str, Any] = {
        "num_generations": 2,
        "max_completion_length": 6,
        "beta": 0.0,
        "per_device_train_batch_size": 2,
    }
    peft: dict[str, Any] = {}
    if lora:
        from peft import LoraConfig

        peft = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}
    model = language_model(kind)
    if settings.get("beta"):  # the reference model is loaded anew
        model.save_pretrained(f"{folder}/model")
        model.config._name_or_path = f"{folder}/model"
    if kind == "moe":
        generate_without_router_loss(model)
    steps.append(
        trl.GRPOTrainer(
            model=model,
            reward_funcs=longer,
            args=arguments(trl.GRPOConfig, folder, {**values, **settings}),
            train_dataset=datasets.Dataset.from_dict({"prompt": texts(64)}),
            processing_class=tokenizer(),
            **peft,
        )
    )
    return watch(steps[0], **(checks or {}))


def generate_without_router_loss(model: Any) -> None:
    """Without a mask, as in generation, the loss counts in a way for which the CPU has no kernel."""
    generate = model.generate

    def quietly(*args: Any, **kwargs: Any) -> Any:
        model.config.output_router_logits = False
        try:
            return generate(*args, **kwargs)
        finally:
            model.config.output_router_logits = True

    model.generate = quietly


def tokenizer() -> Any:
    from pytest_trlcompat import tiny

    return tiny.qwen2().tokenizer


def texts(count: int, salt: int = 0) -> list[str]:
    from pytest_trlcompat import tiny

    words = [row["prompt"] for row in tiny.prompts(count + salt)]
    return [" ".join([words[(index + salt) % len(words)]] * (1 + (index + salt) % 2)) for index in range(count)]
