"""What the corrected GRPO trainer costs real training: time per step and peak memory, held against TRL's own.

A Qwen2 of about 100 million parameters, made here, trains on the CPU in one thread, single process. TRL's trainer and
the corrected one each run in a process of their own and take turns step by step (A B, B A, A B, ...), so that a machine
that gets slower slows both, and nothing that one of them loads or patches touches the other. Seeds and prompts are the
same, so both generate the same tokens. The first steps do not count. Of each pair of steps the ratio of times is taken;
printed are its median and an interval that holds the true median with 95 % confidence, by order statistics. Since other
work on a machine disturbs times by more than a hundredth, another process is sampled: what share of its steps is spent
in this package's own code, and in what that calls of Python's library, and where. And the calls of PyTorch's operators
in a step are counted, which no other work disturbs.

The peak of resident memory is that of two more processes, whose C library gives back at once what is freed: by itself
it keeps pieces of its heap, more or fewer as allocations happen to follow each other. What it comes to then is printed
as well.

    nox -s bench -- training_cost [--pairs 20] [--lora]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SUBJECTS = ("upstream", "corrected")
LIMIT = 1.01
"""Times TRL's own trainer that the corrected one may take."""
FIRST_STEPS = 3
"""Of each process, which do not count."""
SAMPLE = 0.0005
"""Seconds between two samples."""
GIVING_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072"}
"""For glibc: larger pieces are no part of its heap. See mallopt(3)."""
SIZES = {
    "vocab_size": 16384,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "max_position_embeddings": 128,
}
WORDS, TOKENS, ROWS = 16, 16, 4
"""Of a prompt, of a completion, and completions of a step, all of one prompt."""
NO_MORE: Mapping[str, str] = {}
OURS, LIBRARIES = str(ROOT / "pytest_trlcompat"), "site-packages"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="of steps")
    parser.add_argument("--lora", action="store_true", help="train an adapter")
    parser.add_argument("--worker", choices=[*SUBJECTS, "sampled"], help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--count", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        arguments.model = folder
        with ExitStack() as stack:
            workers = {subject: stack.enter_context(worker(subject, arguments)) for subject in SUBJECTS}
            steps, last = alternate(workers, arguments.pairs)
        profile = alone("sampled", arguments)["profile"]
        arguments.pairs = 1
        arguments.count = True
        others = [alone(subject, arguments, GIVING_BACK) for subject in SUBJECTS]
    found = {**last["corrected"]["stack"], "lora": arguments.lora, **compare(steps, last), **profile}
    peaks = [other["peak"] for other in others]
    found["peak_mib"] = [round(peak / 2**20) for peak in peaks]
    found["peak_ratio"] = round(peaks[1] / peaks[0], 4)
    counts = [other["operators"] for other in others]
    found["operators"] = [sum(count.values()) for count in counts]
    names = sorted({*counts[0], *counts[1]})
    found["more_operators"] = {
        name: more for name in names if (more := counts[1].get(name, 0) - counts[0].get(name, 0))
    }
    print(json.dumps(found, indent=1))
    too_slow = found["cpu_ratio"][1] > LIMIT or found["profile_share"] > LIMIT - 1
    if too_slow or found["peak_ratio"] > LIMIT:
        print(f"the corrected trainer takes more than {LIMIT} times what TRL's does", file=sys.stderr)
        return 1
    return 0


# ---- the process that compares


def alternate(
    workers: dict[str, subprocess.Popen[str]], pairs: int
) -> tuple[dict[str, list[dict[str, float]]], dict[str, Any]]:
    """Steps of each worker, those that do not count left out, and what each said last."""
    steps: dict[str, list[dict[str, float]]] = {subject: [] for subject in workers}
    for number in range(FIRST_STEPS + pairs):
        for subject in SUBJECTS if number % 2 == 0 else reversed(SUBJECTS):
            steps[subject].append(step(workers[subject]))
    return {subject: taken[FIRST_STEPS:] for subject, taken in steps.items()}, {
        subject: read(process) for subject, process in workers.items()
    }


def compare(steps: dict[str, list[dict[str, float]]], last: dict[str, Any]) -> dict[str, Any]:
    """Medians of steps, ratios of pairs as (lower end, median, upper end), and peaks of memory."""
    upstream, corrected = (steps[subject] for subject in SUBJECTS)
    found: dict[str, Any] = {"pairs": len(upstream), "parameters": last["upstream"]["parameters"]}
    for kind in ("cpu", "wall"):
        ratios = [mine[kind] / theirs[kind] for mine, theirs in zip(corrected, upstream, strict=True)]
        found[f"{kind}_step_s"] = [round(statistics.median(one[kind] for one in taken), 4) for taken in steps.values()]
        lower, upper = interval(ratios)
        found[f"{kind}_ratio"] = [round(each, 4) for each in (lower, statistics.median(ratios), upper)]
    found["peak_with_heap_mib"] = [round(last[subject]["peak"] / 2**20) for subject in SUBJECTS]
    found["same_losses"] = last["upstream"]["losses"] == last["corrected"]["losses"]
    return found


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Ends of an interval that holds the true median, whatever the distribution: two of the sorted values.

    As many of ``n`` values lie below the median as heads come up in ``n`` throws of a coin.
    """
    ordered, count = sorted(values), len(values)
    rank, outside = 0, 0.0
    while rank < count // 2:
        outside += 2 * math.comb(count, rank) / 2**count
        if outside > 1 - confidence:
            break
        rank += 1
    rank = max(rank - 1, 0)
    return ordered[rank], ordered[count - 1 - rank]


def alone(name: str, arguments: argparse.Namespace, environment: Mapping[str, str] = NO_MORE) -> dict[str, Any]:
    """All steps of one worker, without another beside it; what it said last."""
    with worker(name, arguments, environment) as process:
        for _ in range(FIRST_STEPS + arguments.pairs):
            step(process)
        return read(process)


@contextmanager
def worker(
    name: str, arguments: argparse.Namespace, environment: Mapping[str, str] = NO_MORE
) -> Iterator[subprocess.Popen[str]]:
    """A process of this script that makes a step whenever it is told to; it has built its trainer."""
    command = [sys.executable, __file__, "--worker", name, "--model", arguments.model, "--pairs", str(arguments.pairs)]
    command += [f"--{name}" for name in ("lora", "count") if getattr(arguments, name)]
    settings = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "TOKENIZERS_PARALLELISM": "false", **environment}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **settings}
    ) as process:
        try:
            read(process)
            yield process
        finally:
            process.kill()


def step(process: subprocess.Popen[str]) -> dict[str, float]:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return read(process)


def read(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next thing that a worker says; libraries print other lines.

    Raises:
        RuntimeError: it has ended.
    """
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith('{"said"'):
            said: dict[str, Any] = json.loads(line)["said"]
            return said
    raise RuntimeError(f"a worker ended with status {process.wait()}")


# ---- a worker


def work(arguments: argparse.Namespace) -> None:
    """Build, say so, then make a step for each line of standard input, and say what it took; at last, the rest."""
    import torch

    from pytest_trlcompat import stack
    from pytest_trlcompat.checks import read_memory

    torch.set_num_threads(1)
    subject = "corrected" if arguments.worker == "sampled" else arguments.worker
    steps = FIRST_STEPS + arguments.pairs
    trainer = new_trainer(subject, arguments, steps)
    sampler = Sampler() if arguments.worker == "sampled" else None
    operators: dict[str, int] = {}
    trainer.add_callback(turns(sys.stdin, sampler, counting(operators) if arguments.count else None))
    say({})
    trainer.train()
    model = trainer.model
    say(
        {
            "peak": read_memory().host_peak,
            "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "stack": {name: stack.installed()[name] for name in stack.TELLING},
            "profile": {} if sampler is None else sampler.found(),
            "operators": operators,
        }
    )


def say(said: dict[str, Any]) -> None:
    print(json.dumps({"said": said}), flush=True)


def new_trainer(subject: str, arguments: argparse.Namespace, steps: int) -> Any:
    import transformers
    from datasets import Dataset

    from pytest_trlcompat import tiny
    from suites.in_rank import grpo

    transformers.logging.set_verbosity_error()
    model = tiny.qwen2(directory=arguments.model, **SIZES)
    texts = [" ".join(f"w{(row * 131 + column * 17) % 16000}" for column in range(WORDS)) for row in range(64)]
    more: dict[str, Any] = {}
    if arguments.lora:
        from peft import LoraConfig

        more["peft_config"] = LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = grpo.build_trainer(
        subject,
        model,
        arguments={"train_dataset": Dataset.from_dict({"prompt": texts}), **more},
        per_device_train_batch_size=grpo.counted(ROWS),
        num_generations=ROWS,
        max_prompt_length=WORDS,
        max_completion_length=TOKENS,
        max_steps=steps,
        beta=0.04,
        learning_rate=1e-6,
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def counting(counts: dict[str, int]) -> Any:
    """A context in which every operator's calls are counted in ``counts``, by its name."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counts[str(func)] = counts.get(str(func), 0) + 1
            return func(*args, **(kwargs or {}))

    return Counting()


def turns(lines: IO[str], sampler: Sampler | None, counter: Any) -> Any:
    """A callback that waits for its turn before each step, and says what the step took; the last one is counted."""
    from transformers import TrainerCallback

    class Turns(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self._wait()

        def on_step_end(self, args: Any, state: Any, control: Any, **__: Any) -> None:
            usage = resource.getrusage(resource.RUSAGE_SELF)
            if sampler is not None:
                sampler.stop(counts=state.global_step > FIRST_STEPS)
            if counter is not None and state.global_step == state.max_steps:
                counter.__exit__(None, None, None)
            say({"wall": time.monotonic() - self.wall, "cpu": usage.ru_utime - self.cpu})
            if state.global_step < state.max_steps:
                self._wait()
                if counter is not None and state.global_step == state.max_steps - 1:
                    counter.__enter__()

        def _wait(self) -> None:
            lines.readline()
            self.wall = time.monotonic()
            self.cpu = resource.getrusage(resource.RUSAGE_SELF).ru_utime
            if sampler is not None:
                sampler.start()

    return Turns()


class Sampler:
    """Interrupts the main thread again and again, and adds the time since the last interruption to who was at work.

    That is the innermost function of a package: what Python's own library does counts for whoever called it. A kernel
    cannot be interrupted, so that its time counts for the function that called it.
    """

    def __init__(self) -> None:
        self._step: defaultdict[str, float] = defaultdict(float)
        self._all: defaultdict[str, float] = defaultdict(float)
        self._last = 0.0
        signal.signal(signal.SIGALRM, self._sample)

    def start(self) -> None:
        self._step.clear()
        self._last = time.perf_counter()
        signal.setitimer(signal.ITIMER_REAL, SAMPLE, SAMPLE)

    def stop(self, counts: bool) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if counts:
            for name, spent in self._step.items():
                self._all[name] += spent

    def found(self) -> dict[str, Any]:
        total = sum(self._all.values())
        own = {name: spent for name, spent in self._all.items() if name}
        most = sorted(own.items(), key=lambda each: -each[1])
        return {
            "profile_share": round(sum(own.values()) / total, 6),
            "profile": {name: round(spent / total, 6) for name, spent in most[:8]},
        }

    def _sample(self, _signal: int, frame: Any) -> None:
        now = time.perf_counter()
        while frame is not None and not frame.f_code.co_filename.startswith(OURS):
            if LIBRARIES in frame.f_code.co_filename:
                frame = None
                break
            frame = frame.f_back
        name = "" if frame is None else f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"
        self._step[name] += now - self._last
        self._last = now


if __name__ == "__main__":
    sys.exit(main())
