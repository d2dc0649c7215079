"""Plant faults into TRL's code for vLLM, one at a time, and look for them by the judgements of ``suites/vllm``.

``nox -s bench -- vllm_faults [NUMBER ...]``, in the environment of a cell with vLLM. Nothing on disk is changed: each
fault is planted in a rank, into the source of a module, which is run again there. A fault is found where the judgement
that is named beside it answers otherwise than without the fault, or the training ends with an exception.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pytest_trlcompat import tiny  # noqa: E402
from pytest_trlcompat.catalog.verdict import Verdict  # noqa: E402
from pytest_trlcompat.launch import Launcher, LaunchError  # noqa: E402
from suites.in_rank import models, vllm_training  # noqa: E402
from suites.vllm import judging  # noqa: E402
from suites.vllm.trainings import VLLMTraining, sizes  # noqa: E402

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FAULTS = Path(__file__).with_suffix(".toml")
JUDGEMENTS = {"weights": judging.weights, "policy": judging.policy, "batches": judging.batches}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", type=int, metavar="NUMBER", help="of faults; all by default")
    options = parser.parse_args()
    with open(FAULTS, "rb") as file:
        document = tomllib.load(file)
    if metadata.version("trl") != document["release"]:
        print(f"the faults are for trl {document['release']}, not {metadata.version('trl')}", file=sys.stderr)
        return 2
    faults = document["fault"]
    chosen = options.numbers or list(range(len(faults)))
    with tempfile.TemporaryDirectory() as folder, Launcher(device="software", timeout=180) as launch:
        sound = {
            label: _judged(launch, label, None, folder) for label in dict.fromkeys(faults[n]["label"] for n in chosen)
        }
        found = 0
        for number in chosen:
            fault = faults[number]
            what = _judged(launch, fault["label"], fault, folder)[fault["shown"]]
            # What TRL itself is wrong in must be worse with the fault: an adapter's merge drifts by 1e-8 without one.
            caught = what != sound[fault["label"]][fault["shown"]]
            found += caught
            answer = f"{fault['shown']}: {what}" if caught else "SURVIVED"
            print(f"{number:3} {fault['label']:12} {fault['what']}: {answer}", flush=True)
    print(f"{found} of {len(chosen)} faults found")
    return 0 if found == len(chosen) else 1


def _judged(launch: Launcher, label: str, fault: Mapping[str, Any] | None, folder: str) -> dict[str, str]:
    """By judgement the verdict, and for ``policy`` also the order of magnitude by which it was changed."""
    strategy, _, variant = label.partition("-")
    model = tiny.qwen2(directory=folder, **sizes(variant))
    launch(models.save_model, model, strategy="single")
    try:
        ranks = launch(_train, model, variant, None if fault is None else dict(fault), strategy=strategy, sharded=False)
    except LaunchError as error:
        if error.failure is not None and error.failure.type_name in ("SyntaxError", "IndentationError", "SystemExit"):
            raise SystemExit(f"{label}: the fault cannot be planted: {error.failure.message}") from error
        return dict.fromkeys(JUDGEMENTS, f"launch: {str(error).splitlines()[0]}")
    training = VLLMTraining(ranks.values)
    answers = {}
    for name, judge in JUDGEMENTS.items():
        if training.failure:
            answers[name] = training.failure.splitlines()[0][:100]
            continue
        try:
            finding = judge(training, label)
        except AssertionError as error:
            answers[name] = f"refused: {str(error).splitlines()[0]}"
            continue
        answers[name] = str(finding.verdict)
        if name == "policy" and finding.verdict is not Verdict.OK:
            answers[name] += f", changed by {finding.evidence['most_changed']:.0e}"
    return answers


def _train(model: Any, variant: str, fault: dict[str, Any] | None) -> dict[str, Any]:
    import trl
    import trl.generation.vllm_generation as generation
    import trl.trainer.grpo_trainer as trainer

    if fault is not None:
        module = generation if fault["module"].endswith("vllm_generation") else trainer
        path = str(module.__file__)
        source = Path(path).read_text(encoding="utf-8")
        if fault["old"] not in source:
            raise SystemExit(f"this release of trl has nowhere: {fault['old']!r}")
        planted = compile(source.replace(fault["old"], fault["new"]), path, "exec")
        exec(planted, vars(module))  # noqa: S102 - the installed module, with one fault
        trainer.VLLMGeneration = generation.VLLMGeneration
        trl.GRPOTrainer = trainer.GRPOTrainer
    return vllm_training.train("upstream", model, variant)


if __name__ == "__main__":
    sys.exit(main())
