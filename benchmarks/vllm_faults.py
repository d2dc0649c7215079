"""Plant faults into TRL's code for vLLM, one at a time, and look for them by the judgements of ``suites/vllm``.

``nox -s bench -- vllm_faults [NUMBER ...]``, in the environment of a cell with vLLM, and of one with the recording
engine in its place; each has faults of its own for its release of TRL. Nothing on disk is changed: each fault is
planted in a rank, into the source of a module, which is run again there. A fault is found where the judgement that is
named beside it answers otherwise than without the fault, or the training ends with an exception.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
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
from pytest_trlcompat.inference import gloo_transfer  # noqa: E402
from pytest_trlcompat.inference.server import VLLMServer  # noqa: E402
from pytest_trlcompat.launch import Cluster, Launcher, LaunchError  # noqa: E402
from pytest_trlcompat.launch.environment import base_environment  # noqa: E402
from suites.in_rank import models, vllm_training  # noqa: E402
from suites.vllm import verdicts  # noqa: E402
from suites.vllm.trainings import VLLMTraining, of_architecture, sizes  # noqa: E402

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FAULTS = sorted(Path(__file__).parent.glob("vllm_faults*.toml"))
MODULES = ("generation.vllm_client", "generation.vllm_generation", "extras.vllm_client", "trainer.grpo_trainer")
"""Of TRL, in which faults are planted; no release has all of them."""
JUDGEMENTS = {"weights": verdicts.weights, "policy": verdicts.policy, "batches": verdicts.batches}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", type=int, metavar="NUMBER", help="of faults; all by default")
    options = parser.parse_args()
    documents = {each["release"]: each for each in map(_read, FAULTS)}
    if metadata.version("trl") not in documents:
        print(f"there are faults for trl {', '.join(documents)}, not {metadata.version('trl')}", file=sys.stderr)
        return 2
    faults = documents[metadata.version("trl")]["fault"]
    chosen = options.numbers or list(range(len(faults)))
    with contextlib.ExitStack() as exits:
        folder = exits.enter_context(tempfile.TemporaryDirectory())
        stage = _Stage(exits.enter_context(Launcher(device="software", timeout=180)), folder, exits)
        sound = {label: stage.judged(label, None) for label in dict.fromkeys(faults[n]["label"] for n in chosen)}
        found = 0
        for number in chosen:
            fault = faults[number]
            what = stage.judged(fault["label"], fault)[fault["shown"]]
            # What TRL itself is wrong in must be worse with the fault: an adapter's merge drifts by 1e-8 without one.
            caught = what != sound[fault["label"]][fault["shown"]]
            found += caught
            answer = f"{fault['shown']}: {what}" if caught else "SURVIVED"
            print(f"{number:3} {fault['label']:12} {fault['what']}: {answer}", flush=True)
    print(f"{found} of {len(chosen)} faults found")
    return 0 if found == len(chosen) else 1


def _read(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


class _Stage:
    """Where trainings run, with the server that some of them need."""

    def __init__(self, launch: Launcher, folder: str, exits: contextlib.ExitStack) -> None:
        self._launch, self._folder, self._exits = launch, folder, exits

    def judged(self, label: str, fault: Mapping[str, Any] | None) -> dict[str, str]:
        """By judgement the verdict, and for ``policy`` also the order of magnitude by which it was changed."""
        strategy, _, variant = label.partition("-")
        model = of_architecture(tiny.qwen2(directory=self._folder, **sizes(variant)), variant)
        path = self._launch(models.save_model, model, strategy="single").values[0]
        server = self._server(path) if vllm_training.has_server(variant) else None
        planted = None if fault is None else dict(fault)
        return _judged(self._launch, label, (model, variant, planted, server), strategy)

    @functools.cache  # noqa: B019 - as long as the benchmark
    def _server(self, path: str) -> str:
        server = VLLMServer(path, base_environment("software", Cluster()), {"max_model_len": vllm_training.MAX_LENGTH})
        self._exits.callback(server.stop)
        return server.url


def _judged(launch: Launcher, label: str, arguments: tuple[Any, ...], strategy: str) -> dict[str, str]:
    try:
        ranks = launch(_train, *arguments, strategy=strategy, sharded=False)
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


def _train(model: Any, variant: str, fault: dict[str, Any] | None, server: str | None) -> dict[str, Any]:
    import trl

    modules = {}
    for name in MODULES:
        with contextlib.suppress(ModuleNotFoundError):
            modules[name] = importlib.import_module(f"trl.{name}")
    if fault is not None:
        module = modules[fault["module"]]
        path = str(module.__file__)
        source = Path(path).read_text(encoding="utf-8")
        if fault["old"] not in source:
            raise SystemExit(f"this release of trl has nowhere: {fault['old']!r}")
        planted = compile(source.replace(fault["old"], fault["new"]), path, "exec")
        exec(planted, vars(module))  # noqa: S102 - the installed module, with one fault
        if fault["module"].endswith("client"):
            gloo_transfer.adapt_client(module)
        for name in ("VLLMClient", "VLLMGeneration"):
            home = next((each for each in modules.values() if getattr(each, name, None) is not None), None)
            for user in modules.values():
                if home is not None and hasattr(user, name):
                    setattr(user, name, getattr(home, name))
        trl.GRPOTrainer = modules["trainer.grpo_trainer"].GRPOTrainer
    return vllm_training.train("upstream", model, variant, server=server)


if __name__ == "__main__":
    sys.exit(main())
