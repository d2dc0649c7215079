"""How weights travel between a trainer and a vLLM server, without either: two processes that meet, and tensors.

With both it is tested by ``suites/vllm``.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat.inference import control

if TYPE_CHECKING:
    from pytest_trlcompat.launch import Launcher

SHAPES = ((3, 5), (7,), (), (0, 4))
DTYPES = ("float32", "bfloat16", "uint8", "bool")


def send_and_receive(meeting: str) -> dict[str, Any]:
    """The first rank sends from the accelerator, the second receives on the CPU."""
    import os

    import torch
    from accelerate import PartialState

    from pytest_trlcompat.inference.gloo_transfer import communicator
    from tests.launch.listening import listeners

    rank = PartialState().process_index
    before = listeners([os.getpid()])
    group = communicator(meeting, 0, rank, 2, device=0)
    opened = set(listeners([os.getpid()])) - set(before)
    found = {}
    for dtype in DTYPES:
        for shape in SHAPES:
            torch.manual_seed(1)
            truth = (100 * torch.rand(shape)).to(getattr(torch, dtype))
            tensor = truth.to("npu") if rank == 0 else torch.zeros_like(truth)
            group.broadcast(tensor, src=0, stream=None)
            found[f"{dtype} {shape}"] = torch.equal(tensor.cpu(), truth)
    strided = torch.arange(6.0).view(2, 3).t() if rank == 0 else torch.zeros(3, 2)
    group.broadcast(strided, src=0)
    group.group.store = None  # as TRL's client closes it
    return {
        "equal": found,
        "strided": strided.tolist(),
        "elsewhere": sorted(str(each) for each in opened if not each.protected),
    }


def announced(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    """A meeting in a folder that ranks find by their environment."""
    folder.chmod(0o700)
    monkeypatch.setenv(control.CONTROL, str(folder))
    return control.announce_meeting()


def test_a_tensor_of_the_accelerator_arrives_on_the_cpu_bit_by_bit(
    launch: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        token = announced(patched, tmp_path)
        ranks = launch(send_and_receive, token, strategy="ddp", sharded=False).values
    for rank in ranks:
        assert rank["equal"] == {f"{dtype} {shape}": True for dtype in DTYPES for shape in SHAPES}
        assert rank["strided"] == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
        assert rank["elsewhere"] == []  # ports of other addresses


def leave(meeting: str) -> str:
    import torch
    from accelerate import PartialState

    from pytest_trlcompat.inference.gloo_transfer import communicator

    state = PartialState()
    rank = state.process_index
    group = communicator(meeting, 0, rank, 2)
    state.wait_for_everyone()  # one that leaves while the other still connects is another case
    if rank == 0:
        group.leave()
        return ""
    with pytest.raises(RuntimeError) as failed:
        group.broadcast(torch.zeros(3), src=0)
    return str(failed.value)


def test_one_that_leaves_keeps_nobody_waiting(
    launch: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = launch(leave, announced(monkeypatch, tmp_path), strategy="ddp", sharded=False, timeout=30)
    assert re.search("Connection (closed|reset) by peer", result.values[1])


@pytest.mark.parametrize("where", ["10.1.2.3", "nowhere/at/all", "/tmp/meeting", "0" * 32])
def test_what_nobody_has_announced_is_no_meeting(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pytest_trlcompat.inference.gloo_transfer import TransferError, communicator

    tmp_path.chmod(0o700)
    monkeypatch.setenv(control.CONTROL, str(tmp_path))
    with pytest.raises(TransferError, match="meet under a token, in a folder of this user's alone"):
        communicator(where, 51216, 0, 2)
    assert list(tmp_path.iterdir()) == []


def test_a_client_of_another_transfer_is_left_alone() -> None:
    """TRL before 1.11, and TRL with vLLM before 0.28: modules without the function that opens this transfer."""
    from pytest_trlcompat.inference.gloo_transfer import adapt_client

    module = SimpleNamespace(VLLMClient=object(), get_ip=None)
    adapt_client(module)  # type: ignore[arg-type]
    assert vars(module).keys() == {"VLLMClient", "get_ip"}
    assert module.get_ip is None
