"""Silent errors of training, as TrainCheck (OSDI 2025) has collected and published them, made anew for a tiny model.

Each is named by TrainCheck's identifier. Some need a fault that no healthy machine or release has any more: it is
planted where it happened, and the docstring says so. Imports the stack inside functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .checks_bodies import watch
from .healthy_bodies import arguments, language_model, rows

STEPS = 10


def new_trainer(folder: str, cls: Any = None, **settings: Any) -> Any:
    import transformers

    settings = {"max_steps": STEPS, "save_strategy": "no", **settings}
    args = arguments(transformers.TrainingArguments, folder, settings)
    return (cls or transformers.Trainer)(model=language_model("dense"), args=args, train_dataset=rows())


def at_each_step(trainer: Any, call: Callable[[int], None], event: str = "on_step_begin") -> None:
    import transformers

    class Planted(transformers.TrainerCallback):
        pass

    def heard(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
        call(state.global_step)

    setattr(Planted, event, heard)
    trainer.add_callback(Planted())


def deepspeed_1801(folder: str) -> Any:
    """BLOOM-176B: each rank clips by a norm of its own, so that layer norms drift apart. Planted into the gradients."""
    import torch.distributed

    trainer = new_trainer(folder)

    def clip_alone(_: int) -> None:
        for name, parameter in trainer.model.named_parameters():
            if "norm" in name and torch.distributed.get_rank() == 1:
                parameter.grad.mul_(0.5)

    at_each_step(trainer, clip_alone, "on_pre_optimizer_step")
    return watch(trainer, on_failure="warn")


def pytorch_104336(folder: str) -> Any:
    """A model moved after DDP wrapped it: parameters are new ones, of which DDP knows nothing."""
    import torch

    trainer = new_trainer(folder, learning_rate=1e-2)

    def move(step: int) -> None:
        if step == 0:
            for module in trainer.model.modules():
                for name, parameter in list(module._parameters.items()):
                    if parameter is not None:
                        module._parameters[name] = torch.nn.Parameter(parameter.detach().cpu().to(parameter.device))
            moved = [each for each in trainer.model.parameters() if each.requires_grad]
            trainer.optimizer.optimizer.param_groups[0]["params"] = moved
            trainer.optimizer.optimizer.param_groups[1:] = []
            trainer.lr_scheduler.base_lrs = trainer.lr_scheduler.base_lrs[:1]
            trainer.lr_scheduler.lr_lambdas = trainer.lr_scheduler.lr_lambdas[:1]

    at_each_step(trainer, move)
    return watch(trainer, on_failure="warn")


def x_jxmnop(folder: str) -> Any:
    """A trainer that calls the model past its DDP wrapper in every other step, so that no gradient is reduced there."""
    import transformers

    class Buggy(transformers.Trainer):
        def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(self.model if self.state.global_step % 2 == 0 else model, *args, **kwargs)

    return watch(new_trainer(folder, Buggy), on_failure="warn")


def pytorch_84803(folder: str) -> Any:
    """Cards that lose what they send each other. Planted: rank 1 receives zeros in step 3, by DDP's hook."""
    import torch
    import torch.distributed as distributed

    trainer = new_trainer(folder)
    step = [0]
    at_each_step(trainer, lambda number: step.__setitem__(0, number + 1))

    def lossy(_: Any, bucket: Any) -> Any:
        future = distributed.all_reduce(bucket.buffer(), async_op=True).get_future()

        def received(done: Any) -> Any:
            value = done.value()[0] / distributed.get_world_size()
            return torch.zeros_like(value) if step[0] == 3 and distributed.get_rank() == 1 else value

        return future.then(received)

    lossy.__annotations__.clear()  # torch compares them with classes, and not by name

    def wire(number: int) -> None:
        if number == 0:
            trainer.model_wrapped.register_comm_hook(None, lossy)

    at_each_step(trainer, wire)
    return watch(trainer, on_failure="warn")


def accelerate_2665(folder: str) -> Any:
    """An optimizer made before FSDP flattened the parameters (accelerate 2665 and 3256). Its tensors are planted."""
    import torch

    trainer = new_trainer(folder)
    create = trainer.create_optimizer

    def too_early(*args: Any, **kwargs: Any) -> Any:
        optimizer = create(*args, **kwargs)
        for group in optimizer.param_groups:
            group["params"] = [torch.nn.Parameter(each.detach().clone()) for each in group["params"]]
        return optimizer

    trainer.create_optimizer = too_early
    return watch(trainer, on_failure="warn")


def stackoverflow_60335387(folder: str) -> Any:
    """A loop without zero_grad. Here it is the model's and the optimizer's that do nothing."""
    trainer = new_trainer(folder)

    def forget(step: int) -> None:
        if step == 0:
            trainer.model.zero_grad = lambda *_, **__: None
            trainer.optimizer.zero_grad = lambda *_, **__: None

    at_each_step(trainer, forget)
    return watch(trainer, on_failure="warn")


def pytorch_115607(folder: str) -> Any:
    """An optimizer that a compiler froze: after step 3 its steps do nothing. Planted into its step."""
    trainer = new_trainer(folder, max_steps=20)
    saved: list[Any] = []

    def freeze(step: int) -> None:
        weights = [each.detach() for each in trainer.model.parameters()]
        if step >= 3 and saved:
            for weight, kept in zip(weights, saved, strict=True):
                weight.copy_(kept)
        saved[:] = [each.clone() for each in weights]

    at_each_step(trainer, freeze, "on_optimizer_step")
    return watch(trainer, on_failure="warn")


def mmpretrain_702(folder: str) -> Any:
    """A loop that never calls train(), in which the model would freeze a part."""
    import transformers

    class WithoutTrain(transformers.Trainer):
        def training_step(self, model: Any, inputs: Any, *_: Any) -> Any:
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
            self.accelerator.backward(loss)
            return loss.detach()

    trainer = new_trainer(folder, WithoutTrain)
    at_each_step(trainer, lambda _: trainer.model.eval())  # as from_pretrained returns it
    return watch(trainer, on_failure="warn")


def lightning_thunder_725(folder: str) -> Any:
    """A compiler that leaves autocast out: asked for bf16, computed in fp32. Planted around the forward."""
    import torch

    trainer = new_trainer(folder, bf16=True)
    forward = trainer.model.forward

    @functools.wraps(forward)
    def without(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("npu", enabled=False), torch.autocast("cpu", enabled=False):
            return forward(*args, **kwargs)

    trainer.model.forward = without
    return watch(trainer, on_failure="warn")


def transformers_33844(folder: str) -> Any:
    """Attention with dropout in eval mode. Planted behind an attention layer; TrainCheck's needs flash attention."""
    import torch

    from pytest_trlcompat.checks import CHECKS, OPTIONAL

    trainer = new_trainer(folder)
    layer = trainer.model.model.layers[0].mlp
    layer.register_forward_hook(lambda _, __, output: torch.nn.functional.dropout(output, 0.1, training=True))
    return watch(trainer, on_failure="warn", checks=(*CHECKS, *OPTIONAL))


def pytorch_forum_84911(folder: str) -> Any:
    """A pattern of names that freezes everything but normalisation."""
    trainer = new_trainer(folder)
    for name, parameter in trainer.model.named_parameters():
        parameter.requires_grad_("norm" in name)
    return watch(trainer, on_failure="warn")


def stackoverflow_67180955(folder: str) -> Any:
    """Workers of a data loader that draw the same numbers (before torch 1.9). Planted: each seeds itself alike."""
    import torch

    generators: dict[int, Any] = {}

    class Random(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 400

        def __getitem__(self, _: int) -> Any:
            worker = torch.utils.data.get_worker_info().id
            generator = generators.setdefault(worker, torch.Generator().manual_seed(0))
            ids = torch.randint(3, 50, (12,), generator=generator)
            return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}

    trainer = new_trainer(folder, dataloader_num_workers=2)
    trainer.train_dataset = Random()
    return watch(trainer, on_failure="warn")


def same_data_on_every_rank(folder: str) -> Any:
    """No case of TrainCheck's: a data loader that nobody has prepared for several processes."""
    import torch
    import transformers

    class Unprepared(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(self.train_dataset, batch_size=2, collate_fn=self.data_collator)

    return watch(new_trainer(folder, Unprepared), on_failure="warn")


def scheduler_stepped_twice(folder: str) -> Any:
    """No case of TrainCheck's: a callback that steps the scheduler once more."""
    trainer = new_trainer(folder)
    at_each_step(trainer, lambda _: trainer.lr_scheduler.step(), "on_optimizer_step")
    return watch(trainer, on_failure="warn")
