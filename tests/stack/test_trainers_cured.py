"""``cured``: any trainer with the cures that fit its kind in front, once, and loudly where upstream has moved."""

from __future__ import annotations

import copy
import gc
import inspect
import logging
import pickle
import re
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

trl = pytest.importorskip("trl")
transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from pytest_trlcompat import trainers  # noqa: E402 - needs the stack
from pytest_trlcompat.launch import Launcher  # noqa: E402
from pytest_trlcompat.trainers import CureError, cured  # noqa: E402 - needs the stack
from pytest_trlcompat.trainers.curing.cure import check_points  # noqa: E402 - needs the stack
from pytest_trlcompat.trainers.curing.declared_points import all_points  # noqa: E402 - needs the stack
from pytest_trlcompat.trainers.curing.kinds import KINDS  # noqa: E402 - needs the stack
from pytest_trlcompat.trainers.curing.patching import PatchPoint  # noqa: E402 - needs the stack

TRAINER: Any = transformers.Trainer
GRPO_TRAINER: Any = getattr(trl, "GRPOTrainer", object)
GRPO = pytest.mark.skipif(not hasattr(trl, "GRPOTrainer"), reason="this TRL has no GRPOTrainer")


def mixins(trainer: type) -> list[str]:
    return [base.__name__ for base in trainer.__mro__ if base.__name__.endswith("Mixin") and "trlcompat" in str(base)]


def run_with_argument(code: str, argument: str) -> None:
    sys.argv[1:] = [argument]
    exec(code)


class Mine(TRAINER):
    """A user's own."""


def test_any_trainer_gets_the_cures_of_any_trainer() -> None:
    for trainer in (transformers.Trainer, Mine, trl.DPOTrainer):
        made = cured(trainer)
        assert issubclass(made, trainer)
        assert (made.__name__, made.__doc__) == (trainer.__name__, trainer.__doc__)
        assert mixins(made) == list(KINDS["trainer"])
        assert [cure.name for cure in made.cures] == list(KINDS["trainer"])


@pytest.mark.skipif(
    "_get_eval_sampler" not in vars(getattr(trl, "RLOOTrainer", object)), reason="this TRL's RLOO repeats no prompts"
)
def test_rloo_repeats_prompts_too_and_its_evaluation_counts_rows() -> None:
    statuses = {cure.name: cure for cure in cured(trl.RLOOTrainer).cures}
    assert statuses["EvaluationRemainderMixin"].active is None
    assert "Accelerate counts prompts for rows" in statuses["EvaluationRemainderMixin"].reason
    others = {cure.name: cure for cure in cured(trl.DPOTrainer).cures}
    assert others["EvaluationRemainderMixin"].reason == "the sampler of evaluations is Transformers'"


@GRPO
def test_a_subclass_of_trls_gets_those_of_its_kind() -> None:
    class Own(GRPO_TRAINER):
        pass

    assert mixins(cured(Own)) == list(KINDS["grpo"])
    assert cured(Own).__mro__.index(Own) > len(KINDS["grpo"])  # cures stand in front
    assert issubclass(trainers.GRPOTrainer, cured(trl.GRPOTrainer))


@GRPO
def test_nothing_is_cured_twice() -> None:
    assert cured(cured(Mine)) is cured(Mine)
    assert cured(trainers.GRPOTrainer) is trainers.GRPOTrainer

    class Part(trainers.SamplingMixin, GRPO_TRAINER):
        pass

    found = mixins(cured(Part))
    assert sorted(found) == sorted(KINDS["grpo"])


def test_the_same_question_gives_the_same_class_as_long_as_somebody_has_it() -> None:
    made = cured(Mine)
    assert cured(Mine) is made
    without = cured(Mine, without=["FSDPSaveMixin"])
    assert without is not made
    assert without is cured(Mine, without=("FSDPSaveMixin",))

    class Passing(TRAINER):
        pass

    gone = [weakref.ref(cured(Passing)), weakref.ref(Passing)]
    del Passing
    gc.collect()
    assert [one() for one in gone] == [None, None]


@GRPO
def test_a_corrected_trainer_may_take_trls_place(monkeypatch: pytest.MonkeyPatch) -> None:
    import trl.trainer.grpo_trainer as module

    upstream = module.GRPOTrainer
    for holder in (trl, trl.trainer, module):
        monkeypatch.setattr(holder, "GRPOTrainer", trainers.GRPOTrainer)

    theirs: Any = type("Theirs", (trl.GRPOTrainer,), {})

    assert issubclass(theirs, upstream)
    assert cured(theirs) is theirs
    assert cured(trl.GRPOTrainer) is trainers.GRPOTrainer
    assert sum(name == "SamplingMixin" for name in mixins(theirs)) == 1


def test_cures_can_be_left_out_by_name() -> None:
    made = cured(Mine, without=["FSDPSaveMixin"])
    assert mixins(made) == [name for name in KINDS["trainer"] if name != "FSDPSaveMixin"]
    assert cured(Mine, without=["FSDPSaveMixin"]) is made
    with pytest.raises(ValueError, match="without=SamplingMixin: a Mine has no such cure; it has "):
        cured(Mine, without=["SamplingMixin"])


def test_what_was_left_out_stays_out() -> None:
    made = cured(Mine, without=["FSDPSaveMixin"])
    further = type("Further", (made,), {})
    assert (cured(made), cured(further)) == (made, further)
    assert cured(made, without=["FSDPSaveMixin"]) is made
    with pytest.raises(ValueError, match="^without=ResumingMixin: this Mine has it already; leave it out where it was"):
        cured(made, without=["ResumingMixin"])


@pytest.mark.parametrize("trainer", [TRAINER, Mine, trl.SFTTrainer, trl.DPOTrainer, GRPO_TRAINER])
def test_it_takes_what_the_trainer_takes(trainer: Any) -> None:
    if not issubclass(trainer, TRAINER):
        pytest.skip("this TRL has no GRPOTrainer")
    made = cured(trainer)
    assert inspect.signature(made) == inspect.signature(trainer)
    for name in ("__init__", "train", "evaluate", "compute_loss"):
        assert inspect.signature(getattr(made, name)) == inspect.signature(getattr(trainer, name))
    assert "model" in inspect.signature(made).parameters


def test_a_made_class_is_pickled_by_what_it_was_made_of(launch: Launcher) -> None:
    for one in (cured(Mine), cured(Mine, without=["ResumingMixin", "FSDPSaveMixin"])):
        assert pickle.loads(pickle.dumps(one)) is one
    made = cured(TRAINER, without=["ResumingMixin"])
    code = (
        "import pickle, sys\n"
        "made = pickle.loads(bytes.fromhex(sys.argv[1]))\n"
        "print(made.__name__, made.__mro__[-1].__name__, len(made.cures), 'ResumingMixin' in str(made.cures))\n"
    )
    expected = f"Trainer object {len(KINDS['trainer']) - 1} False"
    command = [sys.executable, "-c", code, pickle.dumps(made, pickle.HIGHEST_PROTOCOL).hex()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == expected

    # By the oldest protocol that has it, in a rank, whose server has imported the stack and has not made the class.
    (rank,) = launch(run_with_argument, code, pickle.dumps(made, 2).hex(), strategy="single").ranks
    assert rank.stdout.splitlines()[-1] == expected


@GRPO
def test_a_corrected_trainer_is_pickled_by_its_name_also_into_a_process_that_has_not_made_it() -> None:
    assert (trainers.GRPOTrainer.__module__, trainers.GRPOTrainer.__qualname__) == (
        "pytest_trlcompat.trainers.corrected",
        "GRPOTrainer",
    )
    assert pickle.loads(pickle.dumps(trainers.GRPOTrainer)) is trainers.GRPOTrainer
    code = "import pickle, sys; print(len(pickle.loads(bytes.fromhex(sys.argv[1])).cures))"
    command = [sys.executable, "-c", code, pickle.dumps(trainers.GRPOTrainer).hex()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(len(KINDS["grpo"]))


@pytest.mark.parametrize("name", ["curd", "cured()", "cured(transformers/trainer)"])
def test_names_of_no_made_class_are_not_there(name: str) -> None:
    from pytest_trlcompat.trainers.curing import compose

    with pytest.raises(AttributeError, match=re.escape(f"has no attribute {name!r}")):
        getattr(compose, name)


@pytest.mark.parametrize("wrong", [int, "trl.GRPOTrainer", None])
def test_what_is_no_trainer_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"which is no subclass of transformers\.Trainer; give the class of a trainer"):
        cured(wrong)


def test_a_point_that_upstream_has_renamed_is_an_error_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    renamed = PatchPoint("transformers.trainer:Trainer.save_model_as_it_was_called")
    monkeypatch.setattr(trainers.FSDPSaveMixin, "_points", (renamed,))
    made = cured(Mine)
    version = transformers.__version__
    with pytest.raises(CureError, match=rf"FSDPSaveMixin with transformers {version}: looked for .*as_it_was_called"):
        made()
    status = {cure.name: cure for cure in made.cures}["FSDPSaveMixin"]
    assert status.active is False
    assert "it is not there, although every release should have it" in status.reason
    assert [cure.name for cure in cured(Mine, without=["FSDPSaveMixin"]).cures if "not there" in cure.reason] == []


def test_every_point_is_there_in_the_installed_stack() -> None:
    """Against the installed releases, torch's too; all locked releases of the others: ``nox -s points``."""
    from pytest_trlcompat.trainers.curing.patching import expected, owner_of

    found = [point for mixin, point in all_points() if expected(point) and owner_of(point, mixin)]
    assert len(found) > 30


ARGUMENTS: Any = transformers.TrainingArguments


class Arguments(ARGUMENTS):
    """Some releases of TRL, once imported, ask every ``TrainingArguments`` for that."""

    model_init_kwargs = None


def built(trainer: Any, folder: Path, **settings: Any) -> Any:
    args = Arguments(output_dir=str(folder), report_to="none", use_cpu=True, **settings)
    return cured(trainer)(model=torch.nn.Linear(1, 1), args=args)


def test_a_trainer_can_be_pickled_and_copied(tmp_path: Path) -> None:
    trainer = built(Mine, tmp_path)
    for other in (pickle.loads(pickle.dumps(trainer)), copy.deepcopy(trainer)):
        assert type(other) is type(trainer)
        assert torch.equal(other.model.weight, trainer.model.weight)
        assert other.model.weight is not trainer.model.weight
        assert other.accelerator.clip_grad_norm_.__self__ is other.accelerator


@pytest.mark.parametrize("main", [True, False])
def test_a_training_that_begins_names_its_cures_as_loud_as_transformers_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, main: bool
) -> None:
    said: list[str] = []
    before = transformers.logging.get_verbosity()

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler = Listening()
    logging.getLogger("transformers").addHandler(handler)
    monkeypatch.setattr(TRAINER, "train", lambda self: None)
    monkeypatch.setattr(TRAINER, "is_world_process_zero", lambda self: main)
    try:
        for level in ("warning", "info"):
            trainer = built(Mine, tmp_path, log_level=level)
            trainer.train()
            if level == "warning":
                assert said == []
    finally:
        logging.getLogger("transformers").removeHandler(handler)
        transformers.logging.set_verbosity(before)
    active, depends = ([cure.name for cure in trainer.cures if cure.active is each] for each in (True, None))
    line = ", ".join(active) or "none for certain"
    line += f"; depending on what it meets: {', '.join(depends)}" if depends else ""
    assert [each for each in said if "cures" in each] == [f"Mine: cures at work: {line}"] * main


def test_what_one_strategy_alone_needs_is_an_error_under_that(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch.distributed.fsdp._flat_param import FlatParamHandle

    monkeypatch.delattr(FlatParamHandle, "_writeback_orig_params")
    trainer = built(Mine, tmp_path)
    status = {cure.name: cure for cure in trainer.cures}["FSDPSyncRefModelMixin"]
    missing = "_flat_param:FlatParamHandle._writeback_orig_params, but it is not there"
    assert (status.active, missing in status.reason) == (False, True)

    state = SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=1))
    monkeypatch.setattr(trainer, "accelerator", SimpleNamespace(distributed_type="FSDP", state=state))
    with pytest.raises(CureError, match=rf"^FSDPSyncRefModelMixin with torch .*{re.escape(missing)}"):
        check_points(type(trainer), trainer)
    state.fsdp_plugin.fsdp_version = 2
    check_points(type(trainer), trainer)


def last_line(code: str, folder: Path) -> str:
    """What a Python of its own prints last, in a folder that is its argument."""
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_a_trainer_of_transformers_does_not_import_trls_grpo(tmp_path: Path) -> None:
    """In some releases importing it changes what every ``TrainingArguments`` of the process needs."""
    code = (
        "import sys\n"
        "import torch, transformers\n"
        "from pytest_trlcompat.trainers import cured\n"
        "arguments = lambda: transformers.TrainingArguments(output_dir=sys.argv[1], report_to='none', use_cpu=True)\n"
        "trainer = cured(transformers.Trainer)(model=torch.nn.Linear(1, 1), args=arguments())\n"
        "assert len(trainer.cures) > 9\n"
        "arguments()\n"
        "print([name for name in sys.modules if name.startswith('trl.trainer.grpo')])\n"
    )
    assert last_line(code, tmp_path) == "[]"


def test_a_trainer_of_trl_that_does_not_use_vllm_does_not_import_what_imports_it(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "import trl\n"
        "from pytest_trlcompat import tiny\n"
        "from pytest_trlcompat.trainers import cured\n"
        "model = tiny.qwen2(directory=sys.argv[1])\n"
        "trainer = cured(trl.SFTTrainer)(\n"
        "    model=model.new_model(), processing_class=model.tokenizer, train_dataset=tiny.prompts().rename_column("
        "'prompt', 'text'),\n"
        "    args=trl.SFTConfig(output_dir=sys.argv[1], report_to='none', use_cpu=True, bf16=False),\n"
        ")\n"
        "assert 'VLLMSyncMixin' in {cure.name for cure in trainer.cures}\n"
        "print([name for name in sys.modules if name.startswith(('trl.generation.vllm', 'vllm'))])\n"
    )
    assert last_line(code, tmp_path) == "[]"


def test_a_trainer_does_not_need_what_another_ones_module_cannot_import(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "class Broken:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'trl.trainer.grpo_trainer':\n"
        "            raise ImportError('cannot import name LLM from vllm')\n"
        "sys.meta_path.insert(0, Broken())\n"
        "import trl\n"
        "from pytest_trlcompat.trainers import cured\n"
        "from pytest_trlcompat.trainers.curing.cure import check_points\n"
        "made = cured(trl.SFTTrainer)\n"
        "check_points(made)\n"
        "print([cure.name for cure in made.cures if 'name LLM' in cure.reason])\n"
    )
    assert last_line(code, tmp_path) == "[]"
