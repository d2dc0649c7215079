"""Many launches, at a tenth of which something is killed at random: ``nox -s soak [-- --launches 1000] [--seed 0]``.

Most are small collectives on the software accelerator, some train for real, some are cold. A random rank, the server or
the command of a cold launch gets a signal at a random time. Every launch must then either return the right numbers, or
fail with an error whose first line names what was killed, and by which signal. After each one there may be no process,
no socket and no file more than before; at the end none at all. What is killed when depends on the seed and the number
of the launch alone, as far as the machine lets it; both are printed.

Shared memory is the machine's, so run nothing else at the same time that uses it.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))

from benchmarks.launching.training import train  # noqa: E402 - needs the lines above
from benchmarks.soak import family  # noqa: E402
from pytest_trlcompat import _processes  # noqa: E402
from pytest_trlcompat.launch import Launcher, LaunchError, LaunchWarning  # noqa: E402
from pytest_trlcompat.strategies import DISTINCT  # noqa: E402
from pytest_trlcompat.tiny import TinyModel, qwen2  # noqa: E402
from suites.in_rank.models import save_model  # noqa: E402

KILLED_SHARE = 0.1
TRAINED_SHARE = 0.05
COLD_EVERY = 100
"""One launch of so many is cold, since it takes as long as forty warm ones; half of these are killed."""
SIGNALS = (signal.SIGKILL,) * 12 + (signal.SIGSEGV, signal.SIGTERM, signal.SIGABRT, signal.SIGSTOP)
TIMEOUT = 60.0
STOPPED_TIMEOUT = 5.0
"""Seconds that a launch may take whose rank is going to be stopped, which ends at its timeout alone."""
ROWS = 10


@dataclass(frozen=True)
class Plan:
    """A launch, and what is done to it.

    Attributes:
        victim: ``rank``, ``server``, or of a cold launch ``command`` or ``keeper``; empty where nothing is killed.
        delay: seconds from the call to the kill.
    """

    number: int
    kind: str
    strategy: str
    world_size: int
    victim: str
    signal: signal.Signals
    delay: float

    @property
    def timeout(self) -> float:
        return STOPPED_TIMEOUT if self.victim == "rank" and self.signal == signal.SIGSTOP else TIMEOUT

    def __str__(self) -> str:
        what = f"launch {self.number}: {self.kind} under {self.strategy} on {self.world_size} ranks"
        return f"{what}, {self.signal.name} to the {self.victim} after {self.delay:.3f} s" if self.victim else what


def plan(seed: int, number: int, usual: dict[str, float]) -> Plan:
    """What launch ``number`` is, by the seed alone.

    Args:
        usual: seconds that a launch of each kind takes, within which the kill comes.
    """
    chance = random.Random(f"{seed} {number}")
    cold = number % COLD_EVERY == 0
    kind = "cold" if cold else "training" if chance.random() < TRAINED_SHARE else "collective"
    strategy = chance.choice(DISTINCT) if kind == "training" else "ddp"
    size = 1 if strategy == "single" else 4 if kind == "collective" and chance.random() < 0.1 else 2
    killed = chance.random() < (0.5 if cold else KILLED_SHARE)
    victim = chance.choice(("command", "keeper", "rank") if cold else ("rank",) * 5 + ("server",)) if killed else ""
    number_of_signal = chance.choice(SIGNALS) if victim == "rank" else signal.SIGKILL
    return Plan(number, kind, strategy, size, victim, number_of_signal, chance.uniform(0, usual[kind]))


def collect(number: int) -> list[float]:
    """Ten collectives; the sums depend on the launch, on the number of ranks and on the step."""
    import torch
    from accelerate import PartialState

    state = PartialState()
    sums = []
    for step in range(10):
        value = torch.full((64,), float(number + step * (state.process_index + 1)), device=state.device)
        torch.distributed.all_reduce(value)
        sums.append(value.sum().item() / 64)
    return sums


def collected(number: int, size: int) -> list[float]:
    """What :func:`collect` must return on every one of ``size`` ranks."""
    return [float(sum(number + step * (rank + 1) for rank in range(size))) for step in range(10)]


class Killer:
    """Sends one signal, at its time, to a process of the launch that runs.

    Attributes:
        hit: the process id of whom it was sent to, and the rank's number where it can be known; ``None`` before.
    """

    def __init__(self, plan: Plan, victims: Callable[[str], list[int]]) -> None:
        self._plan, self._victims = plan, victims
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.hit: int | None = None

    def __enter__(self) -> Killer:
        if self._plan.victim:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._plan.victim:
            self._thread.join()

    def _run(self) -> None:
        chance = random.Random(f"victim {self._plan}")
        self._over.wait(self._plan.delay)
        while not self._over.is_set():
            victims = self._victims(self._plan.victim)
            if victims:
                chosen = chance.choice(victims)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(chosen, self._plan.signal)
                    self.hit = chosen
                return
            self._over.wait(0.002)


def victims_of(launch: Launcher, what: str) -> list[int]:
    """The processes that may be hit now."""
    server = next(iter(launch._servers), None)
    if what == "server":
        return [] if server is None else [server._process.pid]
    if what == "rank" and server is not None and (forked := _children(server._process.pid)):
        return forked
    commands = [pid for pid in _processes.children() if _is_command(pid)]
    keepers = [pid for command in commands for pid in _kept(command)]
    if what == "rank":
        return [pid for keeper in keepers for pid in _kept(keeper)]
    return commands if what == "command" else keepers


def _kept(pid: int) -> list[int]:
    """Its children that keep a rank, or have been forked by one that does."""
    return [child for child in _children(pid) if b"launch.keeper" in _command_line(child)]


def _is_command(pid: int) -> bool:
    return any(name in _command_line(pid) for name in (b"accelerate.commands.launch", b"torch.distributed.run"))


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, path.read_text().split())
    return found


class Soak:
    """The launches, and what was found wrong."""

    def __init__(self, launch: Launcher, model: TinyModel, seed: int, folder: Path) -> None:
        self.launch, self.model, self.seed, self.folder = launch, model, seed, folder
        self.problems: list[str] = []
        self.counts: collections.Counter[str] = collections.Counter()
        self.usual = {"collective": 1.0, "training": 3.0, "cold": 20.0}
        self.expected: dict[str, list[Any]] = {}

    def prepare(self) -> None:
        """Learn what the trainings must give, and how long each kind takes."""
        self.launch(save_model, self.model, strategy="single")
        for name in DISTINCT:
            self.expected[name] = self.launch(train, self.model, 1, strategy=name).values
        for kind in ("collective", "training"):
            started = time.monotonic()
            self._call(Plan(1, kind, "ddp", 2, "", signal.SIGKILL, 0.0))
            self.usual[kind] = 1.2 * (time.monotonic() - started)

    def one(self, number: int) -> None:
        """Make a launch, and judge it."""
        chosen = plan(self.seed, number, self.usual)
        self.counts[chosen.kind] += 1
        killer = Killer(chosen, lambda what: victims_of(self.launch, what))
        error, values = None, None
        with warnings.catch_warnings(record=True) as warned, killer:
            warnings.simplefilter("always", LaunchWarning)
            try:
                values = self._call(chosen)
            except LaunchError as raised:
                error = str(raised)
        self.counts["warned that the server had been killed"] += sum(w.category is LaunchWarning for w in warned)
        if killer.hit is not None:
            self.counts[f"{chosen.signal.name} to a {chosen.victim}"] += 1
        if values is not None:
            self.counts["right, though hit" if killer.hit is not None else "right"] += 1
            if values != self._right(chosen):
                self._found(f"{chosen}: {values} instead of {self._right(chosen)}")
        elif killer.hit is None:
            self._found(f"{chosen}: failed though nothing was hit: {error}")
        else:
            self.counts["failed, hit"] += 1
            whole = chosen.kind == "cold" or chosen.signal == signal.SIGSTOP
            if not re.search(_cause(chosen), str(error) if whole else str(error).partition("\n")[0]):
                self._found(f"{chosen}: the error does not name it: {error}")
        self._look_around(chosen)

    def _found(self, problem: str) -> None:
        self.problems.append(problem)
        print(f"problem: {problem}", flush=True)

    def _call(self, chosen: Plan) -> list[Any]:
        settings: dict[str, Any] = {"timeout": chosen.timeout, "strategy": chosen.strategy}
        if chosen.kind == "training":
            return self.launch(train, self.model, 1, world_size=chosen.world_size, **settings).values
        if chosen.kind == "cold":
            settings |= {"mode": "cold", "command": "torchrun"}
        settings |= {"sharded": False, "world_size": chosen.world_size}
        return self.launch(collect, chosen.number, **settings).values

    def _right(self, chosen: Plan) -> list[Any]:
        if chosen.kind == "training":
            return self.expected[chosen.strategy]
        return [collected(chosen.number, chosen.world_size)] * chosen.world_size

    def _look_around(self, chosen: Plan) -> None:
        """Between launches there are this process, what removes its folder, and the server, which sleeps."""
        server = next(iter(self.launch._servers), None)
        ours = {os.getpid(), server._process.pid if server else 0, self.launch._folder._cleaner.pid}  # type: ignore[union-attr]
        for pid in set(family(os.getpid())) - ours:
            self._found(f"{chosen}: process {pid} was left: {_command_line(pid)!r}")
        found = [path.name for path in self.launch._folder.path.iterdir()]  # type: ignore[union-attr]
        if found != ["tmp"]:
            self._found(f"{chosen}: files were left: {found}")


def _cause(chosen: Plan) -> str:
    """What the error must say, in its first line; of a stopped rank anywhere, since others time out with it."""
    if chosen.victim == "rank" and chosen.signal == signal.SIGSTOP:
        return r"rank \d+ was ended by the launcher .*it was stopped by a signal"
    if chosen.victim == "rank":
        return rf"rank \d+ was killed by {chosen.signal.name}"
    if chosen.victim == "server":
        return r"launch server was killed by SIGKILL"
    if chosen.victim == "command":
        return r"torchrun was killed by SIGKILL"
    return r"the process that kept it ended, before it could report|torchrun exited with status"


def sockets() -> int:
    """The sockets that this process and its descendants have open."""
    links = [Path(f"/proc/{pid}/fd").glob("*") for pid in family(os.getpid())]
    return sum(_link(path).startswith("socket:") for paths in links for path in paths)


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def marked() -> Iterator[int]:
    """Processes of any launcher of this run, whoever their parents are."""
    own = os.environ["TRLCOMPAT_SOAK"]
    yield from _processes.marked(f"TRLCOMPAT_SOAK={own}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launches", type=int, default=1000)
    parser.add_argument("--first", type=int, default=1, help="the number of the first launch, to repeat one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts there")
    parsed = parser.parse_args()
    if parsed.launches < 1:
        parser.error(f"--launches {parsed.launches}: nothing would be shown; at least 1")
    os.environ["TRLCOMPAT_SOAK"] = f"{os.getpid()}"
    started, before, open_before = time.monotonic(), shared_memory(), sockets()
    with tempfile.TemporaryDirectory() as path:
        os.environ["TMPDIR"] = tempfile.tempdir = path
        folder = Path(path)
        model = qwen2(directory=folder / "model")
        with Launcher(device="software") as launch:
            soak = Soak(launch, model, parsed.seed, folder)
            soak.prepare()
            print(f"seed {parsed.seed}; a launch takes {soak.usual}", flush=True)
            last = parsed.first + parsed.launches - 1
            for number in range(parsed.first, last + 1):
                soak.one(number)
                if number % max(parsed.launches // ROWS, 1) == 0:
                    hit = sum(count for name, count in soak.counts.items() if " to a " in name)
                    seconds = time.monotonic() - started
                    print(f"{number} launches, {hit} hit, {len(soak.problems)} problems, {seconds:.0f} s", flush=True)
        left = [name.name for name in folder.iterdir() if name.name != "model"]
        soak.problems += [f"{name} was left in TMPDIR" for name in left]
    soak.problems += [f"process {pid} was left: {_command_line(pid)!r}" for pid in marked()]
    soak.problems += [f"process {pid} was left: {_command_line(pid)!r}" for pid in _processes.children()]
    soak.problems += [f"/dev/shm/{name} was left" for name in shared_memory() - before]
    if sockets() != open_before:
        soak.problems.append(f"{sockets()} sockets are open, {open_before} were before")
    for name, count in sorted(soak.counts.items()):
        print(f"{count:6} {name}")
    print(f"{parsed.launches} launches in {time.monotonic() - started:.0f} s; {len(soak.problems)} problems")
    if parsed.json is not None:
        counts = {"seed": parsed.seed, "counts": dict(soak.counts), "problems": soak.problems}
        parsed.json.write_text(json.dumps(counts, indent=1))
    if soak.problems:
        sys.exit("\n".join(soak.problems))


if __name__ == "__main__":
    main()
