"""What ``CompatCallback`` costs a step: a plain ``transformers.Trainer`` with and without it, alternating.

A model trains on the CPU, in one thread; runs of the two kinds alternate (A B A B), so that a machine that gets slower
slows both. Times are the process's own CPU seconds, so that what else the machine does does not count. The first steps
of a run, in which most checks run, are told apart from the later ones. Prints medians of steps and their ratio, and
what the callback itself takes of later steps, in the mean.

    nox -s bench -- checks [--runs 4] [--steps 34] [--hidden-size 384]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

LIMIT = 0.01
"""Share of a step that the callback may take."""
FIRST_STEPS = 2


def main() -> int:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=4, help="of each kind")
    parser.add_argument("--steps", type=int, default=34)
    parser.add_argument("--hidden-size", type=int, default=384)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    run(arguments, watched=True)  # warms up, and is forgotten
    alone: list[float] = []
    together: list[float] = []
    inside: list[float] = []
    first_alone: list[float] = []
    first_together: list[float] = []
    for _ in range(arguments.runs):
        for watched, first, steps in ((False, first_alone, alone), (True, first_together, together)):
            times, spent = run(arguments, watched)
            first.append(sum(times[:FIRST_STEPS]))
            steps.extend(times[FIRST_STEPS:])
            inside.extend(spent[FIRST_STEPS:])
    plain, checked = statistics.median(alone), statistics.median(together)
    share = statistics.mean(inside) / statistics.mean(alone)  # the mean, since most steps have nothing to do
    print(
        json.dumps(
            {
                "steps_of_each": len(alone),
                "step_s": round(plain, 4),
                "step_with_callback_s": round(checked, 4),
                "ratio": round(checked / plain, 4),
                "callback_ms": round(1000 * statistics.mean(inside), 3),
                "callback_share": round(share, 5),
                "first_steps_s": round(statistics.median(first_alone), 3),
                "first_steps_with_callback_s": round(statistics.median(first_together), 3),
            }
        )
    )
    if share > LIMIT:
        print(f"the callback takes {share:.2%} of a step; the limit is {LIMIT:.0%}", file=sys.stderr)
        return 1
    return 0


def run(arguments: argparse.Namespace, watched: bool) -> tuple[list[float], list[float]]:
    """Train once; seconds from one step's end to the next, and of those the ones inside the callback."""
    import transformers

    from pytest_trlcompat.checks import CompatCallback

    class Clock(transformers.TrainerCallback):
        """Comes after the callback that it measures, so that its marks close a step with it."""

        def __init__(self) -> None:
            self.marks: list[float] = []

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.marks.append(time.process_time())

        on_step_end = on_train_begin

    class Timed(CompatCallback):
        spent: list[float]

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            started = time.process_time()
            super().on_step_end(*args, **kwargs)
            self.spent.append(time.process_time() - started)

    with tempfile.TemporaryDirectory() as folder:
        trainer = new_trainer(arguments, folder)
        callback = Timed(trainer)
        callback.spent = []
        if watched:
            trainer.add_callback(callback)
        clock = Clock()
        trainer.add_callback(clock)
        trainer.train()
    times = [after - before for before, after in zip(clock.marks, clock.marks[1:], strict=False)]
    return times, callback.spent


def new_trainer(arguments: argparse.Namespace, folder: str) -> Any:
    import transformers

    from pytest_trlcompat import tiny

    size = arguments.hidden_size
    model = tiny.qwen2(
        hidden_size=size,
        intermediate_size=3 * size,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=4096,
        max_position_embeddings=256,
    ).new_model()
    rows = [{"input_ids": [(row * 7 + column) % 4000 + 3 for column in range(128)]} for row in range(256)]
    for row in rows:
        row["labels"], row["attention_mask"] = row["input_ids"], [1] * 128
    settings = transformers.TrainingArguments(
        output_dir=folder,
        max_steps=arguments.steps,
        per_device_train_batch_size=2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        seed=1,
    )
    transformers.logging.set_verbosity_error()
    trainer = transformers.Trainer(model=model, args=settings, train_dataset=rows)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


if __name__ == "__main__":
    sys.exit(main())
