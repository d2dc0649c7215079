"""One rank of two is debugged, while the other waits for it in a collective."""

from __future__ import annotations

import time
from pathlib import Path

from ..plugin.terminal import Terminal

SOURCE = """
def train():
    from datetime import timedelta

    import torch
    from accelerate import Accelerator, InitProcessGroupKwargs

    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=2))])
    value = torch.full((1,), float(accelerator.process_index + 1), device=accelerator.device)
    breakpoint()
    torch.distributed.all_reduce(value)
    return value.item()


def test_it(launcher):
    result = launcher(train, strategy="ddp", sharded=False, timeout=3)
    assert result.values == [12.0, 12.0]
    assert [rank.stdout for rank in result.ranks] == ["", ""]
"""


def test_one_rank_has_the_prompt_and_the_other_waits(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(SOURCE)
    with Terminal(tmp_path, "--trlcompat-device=software", "--trlcompat-debug-rank=1") as terminal:
        assert "rank.py" not in terminal.wait_for("(Pdb) ")
        time.sleep(5)  # beyond the timeouts of the launch and of the process group
        terminal.type("p value.item()")
        assert "2.0" in terminal.wait_for("(Pdb) ")
        terminal.type("value.fill_(11)")
        terminal.wait_for("(Pdb) ")
        terminal.type("c")
        terminal.wait_for("1 passed")
