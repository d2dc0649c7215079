"""Checks what everything else needs of the software accelerator, on this torch: ``python -m torch_npu.selftest``.

It runs once after a build, in a process of its own, and its result is stored with the build. It prints one JSON
document: for each check ``null`` or what went wrong, and the capabilities that this torch does not have at all. Numbers
are compared with the CPU's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import torch_npu  # noqa: F401 - the device, where torch does not load it by itself

RANKS = 2
PATIENCE_SECONDS = 60.0

FSDP2 = "fsdp2"
"""The capability that torch has from 2.6 on, under the name by which Accelerate imports it."""


class SelfTestFailure(AssertionError):
    """A result on the device is not the CPU's."""


def expect(actual: object, expected: object) -> None:
    if actual != expected:
        raise SelfTestFailure(f"{actual!r} instead of {expected!r}")


def expect_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Expect bitwise equal numbers, on the device."""
    expect(actual.device.type, "npu")
    if not torch.equal(actual.cpu(), expected):
        raise SelfTestFailure(f"{actual.tolist()} instead of {expected.tolist()}")


# ---- one process


def check_allocation() -> None:
    before = torch.npu.memory_allocated(1)
    tensor = torch.ones(3, 4, device="npu:1")
    # 3 x 4 numbers of 4 bytes.
    expect(torch.npu.memory_allocated(1) - before, 48)
    expect(torch.empty(1, device="npu").device, torch.device("npu", 0))
    expect(tensor.sum().item(), 12.0)
    expect(tensor.cpu().device.type, "cpu")
    layer = torch.nn.Linear(2, 2)
    weight = layer.weight
    # As on CUDA: an optimizer that was given the parameter before goes on with it.
    expect(layer.to("npu").weight is weight, True)


def check_placement() -> None:
    """What a GPU refuses is refused: the reason why this device exists."""
    try:
        torch.ones(2, device="npu") + torch.ones(2)
    except RuntimeError as error:
        expect("Expected all tensors to be on the same device" in str(error), True)
    else:
        raise SelfTestFailure("tensors of two devices were added")


def check_messages() -> None:
    """Errors tell numbers, which two C++ libraries in one process cannot."""
    try:
        torch.empty(1, device="npu:9")
    except RuntimeError as error:
        expect(str(error).splitlines()[0].split(":")[0], "invalid device ordinal 9")
    else:
        raise SelfTestFailure("there is a device npu:9")


def check_views() -> None:
    tensor = torch.arange(6, device="npu").view(2, 3)
    tensor.t()[0] += 10
    expect_equal(tensor, torch.tensor([[10, 1, 2], [13, 4, 5]]))
    # Twice the bytes of its 6 numbers.
    tensor.untyped_storage().resize_(96)
    expect(tensor.untyped_storage().nbytes(), 96)


def check_autograd() -> None:
    gradients = []
    for device in ("cpu", "npu"):
        torch.manual_seed(0)
        layer = torch.nn.Linear(3, 2).to(device)
        torch.nn.functional.silu(layer(torch.ones(4, 3, device=device))).square().mean().backward()
        gradients.append((layer.weight.grad, layer.bias.grad))
    for on_cpu, on_device in zip(*gradients):  # noqa: B905 - Python 3.9
        expect_equal(on_device, on_cpu)


def check_autocast() -> None:
    # bfloat16 has steps of 2**-7 above 1: if the product is computed in it, the 2**-9 is rounded away.
    left, right = torch.full((2, 2), 1.0 + 2**-9, device="npu"), torch.eye(2, device="npu")
    with torch.autocast("npu", dtype=torch.bfloat16):
        product = left @ right
    expect(product.dtype, torch.bfloat16)
    expect_equal(product, torch.ones(2, 2, dtype=torch.bfloat16))


def check_conjugate() -> None:
    """PyTorch conjugates lazily: the tensor carries a mark, and each kernel has to be given the numbers meant."""
    on_cpu = torch.tensor([1 + 2j, 3 - 4j])
    on_device = on_cpu.to("npu")
    expect(on_device.conj().is_conj(), True)
    expect_equal(on_device.conj() * on_device, on_cpu.conj() * on_cpu)
    expect_equal(on_device.conj().imag + 0, on_cpu.conj().imag + 0)


def check_random_state() -> None:
    torch.manual_seed(7)
    on_cpu = torch.rand(3)
    torch.npu.manual_seed(7)
    expect_equal(torch.rand(3, device="npu"), on_cpu)
    state = torch.npu.get_rng_state()
    first = torch.rand(3, device="npu")
    torch.npu.set_rng_state(state)
    expect_equal(torch.rand(3, device="npu"), first.cpu())
    generator = torch.Generator("npu")
    generator.manual_seed(7)
    expect_equal(torch.rand(3, device="npu", generator=generator), on_cpu)


def check_streams() -> None:
    stream = torch.npu.Stream()
    with torch.npu.stream(stream):
        expect(torch.npu.current_stream(), stream)
    expect(torch.npu.current_stream(), torch.npu.default_stream())
    event = torch.npu.Event(enable_timing=True)
    event.record(stream)
    torch.npu.current_stream().wait_event(event)
    torch.npu.current_stream().wait_stream(stream)


# ---- two processes
NUMBERS_PER_RANK = 15
"""Of the 30 in the network: 4 x 4 + 4 in its first layer, 4 x 2 + 2 in its second."""


def check_collectives(rank: int) -> None:
    import torch.distributed as dist

    tensor = torch.full((2,), float(rank + 1), device="npu")
    dist.all_reduce(tensor)
    expect_equal(tensor, torch.tensor([3.0, 3.0]))
    dist.broadcast(tensor.fill_(rank + 5), src=1)
    expect_equal(tensor, torch.tensor([6.0, 6.0]))
    part = torch.empty(1, device="npu")
    dist.reduce_scatter_tensor(part, torch.arange(2.0, device="npu") + rank, op=dist.ReduceOp.AVG)
    # The mean over ranks of [0, 1] and [1, 2]; each rank has the element of its number.
    expect_equal(part, torch.tensor([rank + 0.5]))


def _network(device: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)).to(device)


def _batch(rank: int) -> torch.Tensor:
    return torch.arange(8.0).view(2, 4) / 8 + rank


def _train(model: Any, batches: list[torch.Tensor]) -> None:
    for batch in batches:
        # FSDP averages gradients over ranks, so one process averages over the batches of all ranks.
        (model(batch).square().mean() / len(batches)).backward()
    # By hand: torch.optim imports the compiler, which takes seconds.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad


def _expected_output(probe: torch.Tensor) -> torch.Tensor:
    """The network's output after a step on the batches of all ranks, in one process on the CPU."""
    network = _network("cpu")
    _train(network, [_batch(rank) for rank in range(RANKS)])
    return network(probe).detach()


def _check_sharded(rank: int, model: Any, sharded: int) -> None:
    """Check a step of a sharded model, of whose parameters this rank holds ``sharded`` numbers."""
    probe = torch.ones(1, 4)
    expected = _expected_output(probe)
    expect(sum(_local(parameter).numel() for parameter in model.parameters()), sharded)
    _train(model, [_batch(rank).to("npu")])
    output = model(probe.to("npu")).detach()
    expect(output.device, torch.device("npu", rank))
    if not torch.allclose(output.cpu(), expected, rtol=0, atol=1e-6):
        raise SelfTestFailure(f"after a step the model gives {output.tolist()} instead of {expected.tolist()}")


def _local(parameter: Any) -> torch.Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def check_fsdp1(rank: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({torch.nn.Linear})
    model = FullyShardedDataParallel(
        _network("cpu"), auto_wrap_policy=policy, device_id=torch.device("npu", rank), use_orig_params=True
    )
    _check_sharded(rank, model, NUMBERS_PER_RANK)


def check_fsdp2(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = _network("npu")
    mesh = init_device_mesh("npu", (RANKS,))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    _check_sharded(rank, model, NUMBERS_PER_RANK)


# ---- running them


def absent() -> dict[str, str]:
    """Capabilities that this torch does not have on any device, with the reason."""
    import torch.distributed.fsdp as fsdp

    if hasattr(fsdp, "fully_shard"):
        return {}
    return {FSDP2: f"torch {torch.__version__} has no torch.distributed.fsdp.fully_shard, which came with torch 2.6"}


ALONE = (
    check_allocation,
    check_placement,
    check_messages,
    check_views,
    check_autograd,
    check_autocast,
    check_conjugate,
    check_random_state,
    check_streams,
)
TOGETHER = (check_collectives, check_fsdp1, check_fsdp2)


def run() -> dict[str, Any]:
    """Run all checks. Nothing is raised: a failure, a crash and a hang are results."""
    # Once here, and not in each process that is forked.
    for module in ("torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo"):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    missing = absent()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="trlcompat-selftest-") as name:
        folder = Path(name)
        processes = [_fork("one process", folder, functools.partial(_alone, folder))]
        for rank in range(RANKS):
            who = f"rank {rank} of {RANKS}"
            processes.append(_fork(who, folder, functools.partial(_rank, rank, who, folder, missing)))
        deadline = time.monotonic() + PATIENCE_SECONDS
        ends = {who: _wait(pid, deadline) for who, pid in processes}
        together = [check for check in TOGETHER if _name(check) not in missing]
        alone, *ranks = ends
        checks = {
            **{_name(check): _first_failure(_name(check), folder, {alone: ends[alone]}) for check in ALONE},
            **{
                _name(check): _first_failure(_name(check), folder, {who: ends[who] for who in ranks})
                for check in together
            },
        }
    return {
        "torch": str(torch.__version__),
        "checks": checks,
        "absent": missing,
        "seconds": round(time.monotonic() - started, 2),
    }


def _name(check: Callable[..., None]) -> str:
    return check.__name__.removeprefix("check_")


def _fork(who: str, folder: Path, function: Callable[[], None]) -> tuple[str, int]:
    """Run a function in a process of its own, where a crash is a result; returns ``who`` and the process's number."""
    pid = os.fork()
    if pid != 0:
        return who, pid
    status = 1
    try:
        function()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _alone(folder: Path) -> None:
    for check in ALONE:
        _note("one process", _name(check), folder, check)


def _rank(rank: int, who: str, folder: Path, missing: dict[str, str]) -> None:
    import torch.distributed as dist

    # A rank whose fellow is gone waits for it until the parent ends it.
    store = dist.FileStore(str(folder / "store"), RANKS)
    torch.npu.set_device(rank)
    dist.init_process_group(
        "hccl", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=PATIENCE_SECONDS)
    )
    for check in TOGETHER:
        if _name(check) not in missing:
            _note(who, _name(check), folder, functools.partial(check, rank))
    # Nobody leaves while another one still talks to it.
    dist.barrier()


def _note(who: str, name: str, folder: Path, check: Callable[[], None]) -> None:
    """Write down the outcome of a check. A check that did not return leaves an empty file."""
    file = folder / f"{name} {who}"
    file.touch()
    outcome = None
    try:
        check()
    except Exception as error:
        line = traceback.extract_tb(error.__traceback__)[-1]
        text = (str(error).splitlines() or [""])[0][:400]
        outcome = f"{type(error).__name__}: {text} ({Path(line.filename).name}:{line.lineno}, {line.name})"
    file.write_text(json.dumps(outcome), encoding="utf-8")


def _wait(pid: int, deadline: float) -> str:
    """How a process ended. A process that has not ended by the deadline is killed."""
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return f"killed by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit status {code}"
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return f"no end within {PATIENCE_SECONDS:.0f} s"


def _first_failure(name: str, folder: Path, ends: dict[str, str]) -> str | None:
    """The first failure of a check in these processes."""
    for who, end in ends.items():
        file = folder / f"{name} {who}"
        text = file.read_text(encoding="utf-8") if file.exists() else None
        if text is None:
            return f"{who}: was not begun ({end})"
        outcome = json.loads(text) if text else f"did not return ({end})"
        if outcome is not None:
            return f"{who}: {outcome}"
    return None


if __name__ == "__main__":
    print(json.dumps(run()))
