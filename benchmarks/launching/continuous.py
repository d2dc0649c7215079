"""PyTorch's ``MultiProcContinuousTest`` itself: processes that live as long as the test class, for all of its tests."""

from __future__ import annotations

import json
import os
import sys
import unittest
from pathlib import Path

from torch.testing._internal.common_distributed import MultiProcContinuousTest

from benchmarks.launching.serve import serve

_FOLDER = "TRLCOMPAT_BENCH_RESULTS"
"""Names the file with the folder of the current launch, since the processes outlive launches."""


class ContinuousTest(MultiProcContinuousTest):
    world_size = int(os.environ["TRLCOMPAT_BENCH_WORLD_SIZE"])

    @classmethod
    def backend_str(cls) -> str:
        return "hccl"

    @classmethod
    def _init_pg(cls, rank: int, world_size: int, rdvz_file: str) -> None:
        import torch

        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        torch.npu.set_device(rank)
        super()._init_pg(rank, world_size, rdvz_file)

    def test_training(self) -> None:
        from benchmarks.launching.training import train_here

        losses = train_here()
        folder = Path(Path(os.environ[_FOLDER]).read_text())
        (folder / f"{self.rank}.json").write_text(json.dumps(losses))


def main() -> None:
    def launch(folder: Path, number: int) -> None:
        Path(os.environ[_FOLDER]).write_text(str(folder))
        result = unittest.TestResult()
        ContinuousTest("test_training").run(result)
        if not result.wasSuccessful() or result.skipped:
            print(*(text for _, text in (*result.errors, *result.failures, *result.skipped)), file=sys.stderr)
            raise SystemExit("the test failed")

    try:
        serve(launch)
    finally:
        ContinuousTest.tearDownClass()


if __name__ == "__main__":
    main()
