"""What the software accelerator cannot do is reported as its own limit: by launches, the judge, and a user's own tests.

The operator is one that the device really has no kernel for, the names are ones that its stand-in really lacks.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat import tiny
from pytest_trlcompat.accelerator.artefacts import What
from pytest_trlcompat.catalog.verdict import Verdict, read_records
from pytest_trlcompat.launch import Launcher, LaunchError

OPERATOR = "trlcompat_test::fused_act"
MODEL = tiny.qwen2(num_hidden_layers=1)


def lack_an_operator() -> None:
    """An operator of an extension, with a kernel for CUDA alone, in the middle of a model of Transformers."""
    import torch

    library = torch.library.Library("trlcompat_test", "DEF")
    library.define("fused_act(Tensor hidden) -> Tensor")
    library.impl("fused_act", lambda hidden: hidden, "CUDA")

    class Fused(torch.nn.Module):
        def forward(self, hidden: Any) -> Any:
            return torch.ops.trlcompat_test.fused_act(hidden)

    model = MODEL.new_model().to("npu")
    model.model.layers[0].mlp.act_fn = Fused()
    model(input_ids=torch.ones(1, 4, dtype=torch.long, device="npu"))


def lack_a_name() -> None:
    import torch

    torch.npu.set_stream_limit(0, 1, 1)


def failure_of(launch: Launcher, body: Callable[[], Any], **settings: Any) -> LaunchError:
    with pytest.raises(LaunchError) as caught:
        launch(body, **{"strategy": "single", "sharded": False, **settings})
    return caught.value


def test_a_missing_operator_is_named_before_anything_else(launch: Launcher) -> None:
    error = failure_of(launch, lack_an_operator)
    first, second, *rest = str(error).splitlines()
    assert "device software failed; first observed failure: rank 0 raised NotImplementedError after" in first
    assert second.startswith(f"This is a limit of the software accelerator (operator {OPERATOR}, torch ")
    assert second.endswith("Report it to pytest-trlcompat, or test on a GPU with --trlcompat-device cuda.")
    assert any("modeling_qwen2.py" in line for line in rest)
    assert error.artefact is not None
    assert (error.artefact.what, error.artefact.name) == (What.OPERATOR, OPERATOR)


def test_a_name_that_the_stand_in_lacks(launch: Launcher) -> None:
    error = failure_of(launch, lack_a_name, strategy="ddp")
    assert error.artefact is not None
    assert (error.artefact.what, error.artefact.name) == (What.ATTRIBUTE, "torch.npu.set_stream_limit")
    assert "stand-in for torch_npu has no 'torch.npu.set_stream_limit'" in str(error)


def test_under_a_real_launchers_command_as_well(launch: Launcher) -> None:
    error = failure_of(launch, lack_a_name, strategy="ddp", mode="cold", command="torchrun")
    assert error.artefact is not None
    assert error.artefact.name == "torch.npu.set_stream_limit"


def test_libraries_that_look_before_they_ask_are_answered(launch: Launcher) -> None:
    def look() -> dict[str, Any]:
        import importlib.util

        import torch
        import torch_npu

        modules = [torch_npu, torch.npu, torch.npu.amp, torch.npu.memory, torch.npu.random]
        return {
            "has": [hasattr(module, "no_such_name") for module in modules],
            "default": getattr(torch.npu, "no_such_name", 7),
            "spec": importlib.util.find_spec("torch_npu.contrib"),
            "device": hasattr(torch.npu.device(0), "no_such_name"),
            "there": [hasattr(torch.npu, name) for name in ("is_available", "memory", "Stream", "amp")],
        }

    assert launch(look, strategy="single", sharded=False).values == [
        {"has": [False] * 5, "default": 7, "spec": None, "device": False, "there": [True] * 4}
    ]


def import_a_name() -> None:
    from torch_npu import npu_rms_norm  # noqa: F401


def import_a_module() -> None:
    import torch_npu.contrib.transfer_to_npu  # noqa: F401


@pytest.mark.parametrize(
    ("body", "name"), [(import_a_name, "torch_npu.npu_rms_norm"), (import_a_module, "torch_npu.contrib")]
)
def test_imports_that_fail_are_known_by_pythons_words(launch: Launcher, body: Callable[[], Any], name: str) -> None:
    error = failure_of(launch, body)
    assert error.artefact is not None
    assert (error.artefact.what, error.artefact.name) == (What.ATTRIBUTE, name)


def test_a_libraries_own_fault_is_none(launch: Launcher) -> None:
    def misplace() -> Any:
        import torch

        return torch.ones(2, device="npu") @ torch.ones(2)

    error = failure_of(launch, misplace)
    assert error.artefact is None
    assert "limit of the software accelerator" not in str(error)


def test_a_branch_for_npus_is_named_with_its_condition(launch: Launcher, tmp_path: Path) -> None:
    """A made-up library, of which the ranks read the source."""
    site = tmp_path / "site-packages" / "somelib"
    site.mkdir(parents=True)
    (site / "__init__.py").write_text(
        "from accelerate.utils import is_npu_available\n\n\n"
        "def shared(device):\n    return int(device)\n\n\n"
        "def setup(fail_here):\n"
        "    if is_npu_available():\n"
        "        return int('npu') if fail_here else shared('npu')\n"
    )

    def use(folder: str, fail_here: bool) -> None:
        import sys

        sys.path.insert(0, folder)
        import somelib  # type: ignore[import-not-found]

        somelib.setup(fail_here)

    artefacts = []
    for fail_here in (True, False):
        with pytest.raises(LaunchError, match="invalid literal for int") as caught:
            launch(use, str(site.parent), fail_here, strategy="single", sharded=False)
        artefacts.append(caught.value.artefact)
    assert artefacts[0] is not None
    assert (artefacts[0].what, artefacts[0].name) == (What.BRANCH, "somelib/__init__.py:10")
    assert artefacts[0].reason == "no GPU goes there, only where is_npu_available() in setup"
    assert artefacts[1] is None  # a GPU goes through ``shared`` as well


PROJECT = """
import pytest
from pytest_trlcompat.plugin.judging import Finding
from pytest_trlcompat.suites.in_rank.sharding import failure
from pytest_trlcompat.catalog.verdict import Verdict

def lack():
    import torch
    torch.npu.set_stream_limit(0, 1, 1)

def catch():
    with failure() as caught:
        lack()
    return caught["text"]

def test_of_a_user(launcher):
    launcher(lack, strategy="single", sharded=False)

@pytest.mark.known_issue("grpo-fsdp-ref-model")
@pytest.mark.parametrize("subject", ["upstream", "corrected"])
def test_raised(judge, launcher, subject):
    def measure():
        launcher(lack, strategy="single", sharded=False)
    judge(measure, subject=subject, strategy="fsdp1")

@pytest.mark.known_issue("grpo-fsdp-ref-model")
def test_caught(judge, launcher):
    def measure():
        (text,) = launcher(catch, strategy="single", sharded=False).values
        return Finding(Verdict.ERROR, {"failure": text})
    judge(measure, subject="upstream", strategy="fsdp2")
"""


def test_tests_and_suites_report_it(
    run_installed: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "project" / "test_it.py").write_text(PROJECT)
    results = tmp_path / "verdicts.jsonl"
    done = run_installed(
        "test_it.py", "-rs", "--trlcompat-device=software", f"--trlcompat-results={results}", timeout=300
    )
    words = "This is a limit of the software accelerator (attribute torch.npu.set_stream_limit, torch "
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 3 skipped" in done.stdout
    user = done.stdout.partition("test_of_a_user")[2]
    assert words in user
    assert done.stdout.count("could not be tested; predicted is ") == 3
    records = read_records(results)
    assert [(record.subject, record.strategy) for record in records] == [
        ("upstream", "fsdp1"),
        ("corrected", "fsdp1"),
        ("upstream", "fsdp2"),
    ]
    for record in records:
        assert record.verdict is Verdict.UNTESTABLE
        assert record.reason.startswith(words)
    assert records[0].evidence["exception"] == "AttributeError"
    assert json.loads(results.read_text().splitlines()[2])["evidence"]["failure"].startswith("AttributeError: the soft")
