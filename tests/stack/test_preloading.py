"""What a preloaded package may not do with the stack, and that ranks are as clean as without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_trlcompat.launch import Launcher, LaunchError
from pytest_trlcompat.launch.own_packages import import_all

DRAWING = "import random, torch, numpy\ntorch.rand(3), random.random(), numpy.random.rand()\ntorch.manual_seed(5)\n"


def draw() -> list[float]:
    import random

    import numpy
    import torch

    return [torch.rand(1).item(), random.random(), float(numpy.random.rand()), torch.rand(1, device="npu:0").item()]


def test_random_state_and_memory_are_those_of_a_rank_without_it(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trlcompat_drawing.py").write_text(DRAWING)
    monkeypatch.syspath_prepend(str(tmp_path))
    plain = launcher(draw, strategy="single")
    with Launcher(device="software", preload=["trlcompat_drawing"]) as launch:
        preloaded = launch(draw, strategy="single")
    assert preloaded.values == plain.values
    assert preloaded.ranks[0].peak_accelerator_bytes == plain.ranks[0].peak_accelerator_bytes


REFUSED = "trlcompat_preload: importing trlcompat_rude "


@pytest.fixture
def rude(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Writes the package ``trlcompat_rude``, which can then be imported."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(source: str) -> None:
        (tmp_path / "trlcompat_rude.py").write_text(f"import torch\n{source}\n")

    return write


def test_a_server_that_would_give_ranks_a_used_device_is_refused(rude: Callable[[str], None]) -> None:
    rude('HELD = torch.ones(256, device="npu:1")')
    text = r"used the accelerator npu:1 \(\d{4,} bytes\), which ranks would share or could not use"
    with (
        Launcher(device="software", preload=["trlcompat_rude"]) as launch,
        pytest.raises(LaunchError, match=REFUSED + text),
    ):
        launch(draw, strategy="single")


def test_another_default_that_ranks_would_inherit_is_refused(launcher: Launcher, rude: Callable[[str], None]) -> None:
    """In a rank, where the check is the same: a server for it alone would import the stack."""
    rude("torch.set_default_dtype(torch.float64)")
    text = "changed torch's default dtype and device from torch.float32 and"
    with pytest.raises(LaunchError, match=REFUSED + text):
        launcher(import_all, ["trlcompat_rude"], strategy="single")
