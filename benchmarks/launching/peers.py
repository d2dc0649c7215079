"""The ways of launching that launch.py compares, each as a function that makes one launch of two ranks.

Imports nothing of the stack.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchmarks.launching.training import MODEL, train
from pytest_trlcompat import accelerator
from pytest_trlcompat.launch import Launcher, Strategy, strategy
from pytest_trlcompat.launch.cold import accelerate_settings
from pytest_trlcompat.tiny import TinyModel

__all__ = ["PEERS", "WORLD_SIZE", "Losses", "Peer", "PeerError", "Warm", "launching"]

ROOT = Path(__file__).resolve().parents[2]
WORLD_SIZE = 2
Losses = list[list[float]]


class PeerError(RuntimeError):
    """A way of launching failed, with its own words."""


class Peer:
    """One way of launching.

    Args:
        model: what is trained; it lies on disk.
        folder: for the peer's own files.
        environment: that the ranks' processes start with, the strategy's variables included.
        extra_path: where packages lie that a peer needs and the stack does not.
    """

    name = ""

    def __init__(
        self, chosen: Strategy, model: TinyModel, folder: Path, environment: Mapping[str, str], extra_path: str = ""
    ) -> None:
        self.strategy, self.model, self.folder = chosen, model, folder
        self.environment = dict(environment)
        self.extra_path = extra_path

    def launch(self) -> Losses:
        """Make one launch; the losses of each rank."""
        raise NotImplementedError

    def close(self) -> None:
        """End what launches share."""


class Warm(Peer):
    name = "ours, warm"
    mode = "warm"

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._launcher = Launcher(device="software", timeout=300)

    def launch(self) -> Losses:
        return self._launcher(train, self.model, strategy=self.strategy, world_size=WORLD_SIZE, mode=self.mode).values

    def close(self) -> None:
        self._launcher.close()


class Cold(Warm):
    name = "ours, cold"
    mode = "cold"


class _Command(Peer):
    """A program that starts the ranks."""

    def command(self) -> list[str]:
        raise NotImplementedError

    def launch(self) -> Losses:
        with tempfile.TemporaryDirectory() as results:
            command = [sys.executable, *self.command(), "-m", "benchmarks.launching.rank", results]
            done = subprocess.run(command, env=self.environment, cwd=ROOT, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise PeerError(f"{self.name} failed:\n{done.stderr[-3000:]}")
            return [json.loads((Path(results) / f"{rank}.json").read_text()) for rank in range(WORLD_SIZE)]


class Torchrun(_Command):
    name = "torchrun"

    def command(self) -> list[str]:
        return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD_SIZE)]


class AccelerateLaunch(_Command):
    name = "accelerate launch"

    def command(self) -> list[str]:
        config = self.folder / "accelerate_config.json"
        settings = accelerate_settings(self.strategy, "software", WORLD_SIZE, self.folder)
        config.write_text(json.dumps(settings))
        return ["-m", "accelerate.commands.launch", "--config_file", str(config)]


class _Served(Peer):
    """A process in the role of pytest's, with the state that survives between tests."""

    module = ""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._log = self.folder / "log"
        path = os.pathsep.join(filter(None, [self.environment.get("PYTHONPATH", ""), self.extra_path]))
        more = {"TRLCOMPAT_BENCH_WORLD_SIZE": str(WORLD_SIZE), "TRLCOMPAT_BENCH_RESULTS": str(self.folder / "results")}
        with open(self._log, "w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"benchmarks.launching.{self.module}", str(WORLD_SIZE)],
                env={**self.environment, **more, "PYTHONPATH": path},
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def launch(self) -> Losses:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print("launch", file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise PeerError(f"{self.name} is gone:\n{self._log.read_text()[-3000:]}") from None
        for line in self._process.stdout:
            if line.startswith("losses "):
                losses: Losses = json.loads(line.removeprefix("losses "))
                return losses
        raise PeerError(f"{self.name} failed:\n{self._log.read_text()[-3000:]}")

    def close(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=60)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()


class PlainFork(_Served):
    name = "fork, rendezvous, steps"
    module = "fork"


class DistributedTest(_Served):
    name = "DeepSpeed's DistributedTest"
    module = "pool"


class ContinuousTest(_Served):
    name = "PyTorch's MultiProcContinuousTest"
    module = "continuous"


PEERS: tuple[type[Peer], ...] = (PlainFork, Cold, Torchrun, AccelerateLaunch, DistributedTest, ContinuousTest)
"""What ours, warm, is held against."""


@contextmanager
def launching(
    cls: type[Peer], name: str, model: TinyModel, extra_path: str = ""
) -> Iterator[Callable[[], tuple[float, Losses]]]:
    """A peer under a strategy, as a function that makes one launch and returns its seconds and losses."""
    chosen = strategy(name)
    device = accelerator.environment(devices=WORLD_SIZE)
    path = os.pathsep.join(filter(None, [device.pop("PYTHONPATH"), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    with tempfile.TemporaryDirectory(prefix="trlcompat-bench-") as folder:
        environment = {
            **os.environ,
            **device,
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "GLOO_SOCKET_IFNAME": "lo",
            **chosen.environment(Path(folder)),
            MODEL: str(model.directory),
        }
        peer = cls(chosen, model, Path(folder), environment, extra_path)

        def launch() -> tuple[float, Losses]:
            started = time.monotonic()
            losses = peer.launch()
            return time.monotonic() - started, losses

        try:
            yield launch
        finally:
            peer.close()
