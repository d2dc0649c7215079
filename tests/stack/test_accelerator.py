"""The software accelerator computes what the CPU computes.

Whatever uses the device runs in a launch or in a child process, so that this process keeps a plain torch for others.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from pytest_trlcompat import tiny
from pytest_trlcompat.launch import Launcher

from .accelerator_bodies import beside_two_devices

MODEL = tiny.qwen2(seed=3)
ROWS, LENGTH, STEPS = 4, 12, 3


def batch(torch: Any) -> Any:
    """Token ids ``(ROWS, LENGTH)``, on the CPU."""
    return torch.randint(3, MODEL.vocab_size, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))


def train_on(device: str) -> dict[str, Any]:
    """Everything that a training run computes, as CPU tensors."""
    import torch

    model = MODEL.new_model().to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    computed: dict[str, Any] = {}
    ids = batch(torch).to(device)
    for step in range(STEPS):
        output = model(input_ids=ids, labels=ids)
        optimizer.zero_grad()
        output.loss.backward()
        computed[f"{step}/logits"] = output.logits
        computed[f"{step}/loss"] = output.loss
        computed |= {f"{step}/grad/{name}": parameter.grad.clone() for name, parameter in model.named_parameters()}
        optimizer.step()
        computed |= {f"{step}/weight/{name}": parameter.clone() for name, parameter in model.named_parameters()}
    return {name: tensor.detach().cpu() for name, tensor in computed.items()}


def generate_on(device: str) -> Any:
    """Greedy generation from prompts of different lengths, padded on the left."""
    import torch

    ids = batch(torch)
    mask = torch.ones_like(ids)
    for row in range(ROWS):
        ids[row, :row], mask[row, :row] = tiny.PAD_TOKEN_ID, 0
    model = MODEL.new_model().to(device)
    return model.generate(
        input_ids=ids.to(device), attention_mask=mask.to(device), max_new_tokens=16, do_sample=False
    ).cpu()


def unequal(function: Callable[[str], dict[str, Any]]) -> tuple[int, list[str]]:
    """How many tensors were compared, and the names of those that differ in a single bit."""
    import torch

    expected, found = function("cpu"), function("npu")
    assert expected.keys() == found.keys()
    return len(expected), [name for name in expected if not torch.equal(expected[name], found[name])]


def test_forward_backward_and_adamw_equal_the_cpus_bitwise(launch: Launcher) -> None:
    compared, different = launch(unequal, train_on, strategy="single").values[0]
    assert different == []
    parameters = 3 + 12 * MODEL.num_hidden_layers
    assert compared == STEPS * (2 + 2 * parameters)


def test_greedy_generation_equals_the_cpus(launch: Launcher) -> None:
    def both() -> tuple[list[list[int]], list[list[int]]]:
        return generate_on("cpu").tolist(), generate_on("npu").tolist()

    expected, found = launch(both, strategy="single").values[0]
    assert found == expected
    assert len(expected[0]) == LENGTH + 16 or 1 in expected[0][LENGTH:]


def test_random_numbers_are_the_cpus_from_the_same_seed(launch: Launcher) -> None:
    def draw() -> list[bool]:
        import torch

        torch.manual_seed(7)  # once: each device has a generator of its own

        def numbers(device: str) -> list[Any]:
            drawn = torch.empty(64, device=device).uniform_()
            permutation = torch.randperm(11, device=device)
            return [drawn, permutation, torch.multinomial(drawn, 5), torch.randn(9, device=device)]

        return [torch.equal(one, other.cpu()) for one, other in zip(numbers("cpu"), numbers("npu"), strict=True)]

    assert launch(draw, strategy="single").values[0] == [True] * 4


def test_no_operator_takes_a_composite_where_the_cpu_has_a_kernel(launch: Launcher) -> None:
    """A composite of other operators rounds differently. Fails when a torch release brings another such operator."""

    def composites() -> list[str]:
        import torch

        has = torch._C._dispatch_has_kernel_for_dispatch_key
        return sorted(
            name
            for name in torch._C._dispatch_get_all_op_names()
            if has(name, "CPU")
            and (has(name, "CompositeExplicitAutograd") or has(name, "CompositeImplicitAutograd"))
            and not has(name, "PrivateUse1")
        )

    exact = {  # they move data, or reduce booleans: nothing is rounded
        "aten::_stack",
        "aten::_stack.out",
        "aten::all.dims",
        "aten::all.dims_out",
        "aten::any.dims",
        "aten::any.dims_out",
        "aten::native_channel_shuffle",
    }
    assert set(launch(composites, strategy="single").values[0]) <= exact


# ---- the rest of the device


def test_memory_is_counted_per_device_in_bytes(launch: Launcher) -> None:
    def count() -> dict[str, Any]:
        import torch

        npu = torch.npu
        seen: dict[str, Any] = {"at first": npu.memory_allocated()}
        kept = torch.ones(1000, device="npu:0")  # 4000 bytes of the device's own
        result = kept.nonzero()  # 8000 that a CPU kernel allocated
        other = torch.empty(10, dtype=torch.int64, device="npu:1")
        seen["two tensors"] = npu.memory_allocated(), npu.max_memory_allocated()
        seen["the other device"] = npu.memory_allocated(other.device), npu.max_memory_allocated("npu:1")
        del result
        seen["one freed"] = npu.memory_allocated(), npu.max_memory_allocated()
        seen["summary"] = npu.memory_summary()
        npu.reset_peak_memory_stats()
        seen["reset"] = npu.max_memory_allocated(), torch.accelerator.max_memory_allocated()
        kept.untyped_storage().resize_(0)
        seen["resized"] = npu.memory_allocated()
        return seen

    assert beside_two_devices(launch, count) == {
        "at first": 0,
        "two tensors": (12000, 12000),
        "the other device": (80, 80),
        "one freed": (4000, 12000),
        "summary": "allocated: 4000 bytes, at most 12000",
        "reset": (4000, 4000),
        "resized": 0,
    }


def test_convolutions_work(launch: Launcher) -> None:
    def convolve(device: str) -> dict[str, Any]:
        import torch

        torch.manual_seed(0)
        convolution = torch.nn.Conv1d(4, 6, 3)
        values = torch.rand(2, 4, 9)
        output = convolution.to(device)(values.to(device))
        output.square().sum().backward()
        return {"output": output.cpu(), "gradient": convolution.weight.grad.cpu()}

    assert launch(unequal, convolve, strategy="single").values[0] == (2, [])


def test_autocast_lowers_precision(launch: Launcher) -> None:
    def dtypes() -> list[str]:
        import torch

        layer, values = torch.nn.Linear(4, 4).npu(), torch.rand(2, 4).npu()
        with torch.autocast("npu", dtype=torch.bfloat16):
            return [str(layer(values).dtype), str(torch.nn.functional.softmax(layer(values), -1).dtype)]

    assert launch(dtypes, strategy="single").values[0] == ["torch.bfloat16", "torch.float32"]


def test_streams_and_events(launch: Launcher) -> None:
    def use() -> list[Any]:
        import torch

        npu = torch.npu
        stream = npu.Stream(priority=-1)
        start, end = npu.Event(enable_timing=True), npu.Event(enable_timing=True)
        start.record()
        with npu.stream(stream):
            inside = npu.current_stream() == stream
        time.sleep(0.02)
        end.record()
        return [inside, npu.current_stream() == npu.default_stream(), start.elapsed_time(end) >= 20.0, end.query()]

    assert launch(use, strategy="single").values[0] == [True] * 4


# ---- it has what programs for NPUs call, LlamaFactory as soon as it is imported


def choose_options() -> dict[str, Any]:
    import torch
    import torch_npu

    npu = torch.npu
    seen: dict[str, Any] = {"at first": npu.is_jit_compile_false()}
    npu.set_compile_mode(jit_compile=True)
    seen["compiled"] = npu.is_jit_compile_false()
    npu.set_compile_mode(jit_compile=False)
    seen["not compiled"] = torch_npu.npu.is_jit_compile_false()
    npu.set_option({"NPU_FUZZY_COMPILE_BLACKLIST": "Tril"})
    npu.config.allow_internal_format = True
    npu.matmul.allow_hf32 = npu.conv.allow_hf32 = False
    seen["kept"] = npu.config.allow_internal_format, npu.matmul.allow_hf32, npu.conv.allow_hf32
    wrong: dict[str, Callable[[], Any]] = {
        "misspelt": lambda: setattr(npu.config, "allow_internl_format", True),
        "no options": lambda: npu.set_option("Tril"),
        "static": lambda: npu.amp.GradScaler(dynamic=False),
    }
    for name, act in wrong.items():
        try:
            act()
        except (AttributeError, TypeError) as error:
            seen[name] = str(error)
    return seen


def test_options_of_an_npu_are_kept_and_change_nothing(launch: Launcher) -> None:
    lacks = "the software accelerator's stand-in for torch_npu has no "
    assert launch(choose_options, strategy="single").values[0] == {
        "at first": True,
        "compiled": False,
        "not compiled": True,
        "kept": (True, False, False),
        "misspelt": f"{lacks}'torch.npu.config.allow_internl_format'",
        "no options": "npu option must be a dict, not str",
        "static": f"{lacks}'torch.npu.amp.GradScaler.dynamic'",
    }


def use_mixed_precision() -> list[Any]:
    import torch

    amp: Any = torch.npu.amp

    def double(_: Any, value: Any) -> Any:
        return value * 2

    class Double(torch.autograd.Function):
        forward = staticmethod(amp.custom_fwd(double, cast_inputs=torch.float32))
        backward = staticmethod(amp.custom_bwd(double))

    value = torch.ones(2, dtype=torch.bfloat16, device="npu")
    scaler = amp.GradScaler(2.0, growth_interval=1)
    with amp.autocast(True, torch.bfloat16):
        inside = torch.get_autocast_dtype("npu")
        cast = Double.apply(value).dtype
    with amp.autocast(enabled=False):
        outside = torch.is_autocast_enabled("npu")
    tensors = [getattr(torch.npu, f"{name}Tensor")([1, 0]) for name in ("Float", "Half", "BFloat16", "Long", "Byte")]
    return [str(inside), str(cast), outside, scaler.get_scale(), [f"{each.dtype} {each.device}" for each in tensors]]


def test_mixed_precision_is_torchs_own(launch: Launcher) -> None:
    assert launch(use_mixed_precision, strategy="single").values[0] == [
        "torch.bfloat16",
        "torch.float32",
        False,
        2.0,
        [f"torch.{name} npu:0" for name in ("float32", "float16", "bfloat16", "int64", "uint8")],
    ]
