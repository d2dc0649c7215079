"""What a launch costs, ours against others: ``nox -s bench -- launch [--quick] [--pairs N] [--json FILE]``.

Each way of launching makes the same launch under the same strategy, alternating with our warm launch:
A B A B. What is started once for all tests of a session, such as our server, is started before, by a launch that does
not count. The losses must be the same everywhere. Draws ``launch.svg``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))

from benchmarks.launching import plot  # noqa: E402 - needs the lines above
from benchmarks.launching.peers import PEERS, Losses, Peer, PeerError, Warm, launching  # noqa: E402
from pytest_trlcompat.launch import Launcher  # noqa: E402
from pytest_trlcompat.tiny import TinyModel, qwen2  # noqa: E402
from suites.in_rank.models import save_model  # noqa: E402

STRATEGIES = ("ddp", "zero3", "fsdp1")
PAIRS = 5
TOLERANCE = 1e-4
"""Absolute, of losses that Trainer rounds to four digits in older releases."""


@dataclass
class Figures:
    """Seconds of each launch, alternating; ``failure`` where the other way cannot make it."""

    peer: str
    strategy: str
    ours: list[float]
    others: list[float]
    failure: str | None = None

    @property
    def ratio(self) -> float:
        """How many times as long the other takes: the median over pairs."""
        return statistics.median(other / own for own, other in zip(self.ours, self.others, strict=True))


def compare(cls: type[Peer], strategy: str, model: TinyModel, pairs: int, extra_path: str) -> Figures:
    """Pairs of launches, ours and the other's."""
    figures = Figures(cls.name, strategy, [], [])
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(launching(Warm, strategy, model))
        other = stack.enter_context(launching(cls, strategy, model, extra_path))
        _, expected = ours()
        try:
            _, first = other()
            _same(cls.name, expected, first)
            for _ in range(pairs):
                figures.ours.append(ours()[0])
                seconds, losses = other()
                figures.others.append(seconds)
                _same(cls.name, expected, losses)
        except PeerError as error:
            figures.failure = str(error).strip().splitlines()[-1]
            print(error, file=sys.stderr)
    return figures


def _same(name: str, expected: Losses, found: Losses) -> None:
    one = [loss for rank in expected for loss in rank]
    other = [loss for rank in found for loss in rank]
    if len(one) != len(other) or any(abs(a - b) > TOLERANCE for a, b in zip(one, other, strict=True)):
        raise PeerError(f"{name} trained differently:\nlosses {found} instead of {expected}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_const", const=1, dest="pairs", help="one pair of each")
    parser.add_argument("--pairs", type=int, default=PAIRS, metavar="N", help=f"of each, {PAIRS} by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every launch's seconds there")
    parser.add_argument("--strategy", action="append", choices=STRATEGIES, help="this one only")
    parser.add_argument("--extra-path", default="", help="where expecttest lies, which PyTorch's test class imports")
    parsed = parser.parse_args()
    figures = []
    with tempfile.TemporaryDirectory(prefix="trlcompat-bench-") as folder:
        model = qwen2(directory=folder)
        with Launcher(device="software") as launch:
            launch(save_model, model, strategy="single")
        print("| under | way | seconds, median | ours, warm, at the same time | times ours |")
        print("| --- | --- | --- | --- | --- |")
        for strategy in parsed.strategy or STRATEGIES:
            for cls in PEERS:
                found = compare(cls, strategy, model, parsed.pairs, parsed.extra_path)
                figures.append(found)
                print(_row(found), flush=True)
    if parsed.json is not None:
        parsed.json.write_text(json.dumps([asdict(each) for each in figures], indent=1))
    if parsed.pairs > 1:
        path = Path(__file__).with_name("launch.svg")
        path.write_text(plot.bars([each for each in figures if each.failure is None]))


def _row(figures: Figures) -> str:
    if figures.failure is not None:
        return f"| {figures.strategy} | {figures.peer} | failed: {figures.failure[:120]} | | |"
    ours, other = statistics.median(figures.ours), statistics.median(figures.others)
    return f"| {figures.strategy} | {figures.peer} | {other:.2f} | {ours:.2f} | {figures.ratio:.1f} |"


if __name__ == "__main__":
    main()
