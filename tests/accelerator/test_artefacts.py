"""Which failures are artefacts of the software accelerator. Messages are those of runs with torch 2.9 and 2.13."""

from __future__ import annotations

import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_trlcompat.accelerator import artefacts
from pytest_trlcompat.accelerator.artefacts import (
    Artefact,
    What,
    error_text,
    in_text,
    of_exception,
    of_failure,
    of_program,
    printed_in,
)
from pytest_trlcompat.catalog import known_issues

NO_KERNEL = (
    "Could not run 'aten::_sparse_mm_reduce_impl' with arguments from the 'SparseCsrnpu' backend. This could be "
    "because the operator doesn't exist for this backend, or was omitted during the selective/custom build process (if "
    "using custom build). If you are a Facebook employee using PyTorch on mobile, please visit "
    "https://fburl.com/ptmfixes for possible resolutions. 'aten::_sparse_mm_reduce_impl' is only available for these "
    "backends: [Meta, SparseCsrCPU]."
)
NO_CPU_KERNEL = NO_KERNEL.replace("_sparse_mm_reduce_impl", "_thnn_fused_lstm_cell").replace("SparseCsrnpu", "CPU")


@pytest.mark.parametrize(
    ("type_name", "message", "what", "name"),
    [
        ("NotImplementedError", NO_KERNEL, "operator", "aten::_sparse_mm_reduce_impl for SparseCsrnpu"),
        (
            "NotImplementedError",
            "Could not run 'aten::_has_compatible_shallow_copy_type' with arguments from the 'Autogradnpu' backend.",
            "operator",
            "aten::_has_compatible_shallow_copy_type for Autogradnpu",
        ),
        (
            "NotImplementedError",
            "Could not run 'c10d::broadcast_' with arguments from the 'AutocastPrivateUse1' backend.",
            "operator",
            "c10d::broadcast_ for AutocastPrivateUse1",
        ),
        (
            "RuntimeError",
            "the software accelerator cannot follow aten::set_, which gave an argument another storage; please",
            "operator",
            "aten::set_",
        ),
        (
            "RuntimeError",
            "the software accelerator has no all_to_all of lists with this torch: gloo, on which it stands, has it",
            "capability",
            "all_to_all of lists",
        ),
        (
            "RuntimeError",
            "the software accelerator has no tensors of layout Mkldnn",
            "capability",
            "tensors of layout Mkldnn",
        ),
        (
            "NotImplementedError",
            "_scaled_dot_product_fused_attention_overrideable not implemented. This is an operator for privateuse1 "
            "backends, please use TORCH_LIBRARY_IMPL to override this function ",
            "operator",
            "_scaled_dot_product_fused_attention_overrideable",
        ),
        (
            "AttributeError",
            "module 'torch_npu.npu' has no attribute 'set_compile_mode'",
            "attribute",
            "torch_npu.npu.set_compile_mode",
        ),
        (
            "AttributeError",
            "the software accelerator's stand-in for torch_npu has no 'torch.npu.set_compile_mode'",
            "attribute",
            "torch.npu.set_compile_mode",
        ),
        (
            "ImportError",
            "cannot import name 'npu_rms_norm' from 'torch_npu' (/cache/torch_npu/__init__.py)",
            "attribute",
            "torch_npu.npu_rms_norm",
        ),
        ("ModuleNotFoundError", "No module named 'torch_npu.contrib'", "attribute", "torch_npu.contrib"),
        (
            "AttributeError",
            "'_OpNamespace' 'npu' object has no attribute 'npu_rms_norm'",
            "attribute",
            "torch.ops.npu.npu_rms_norm",
        ),
        (
            "NotImplementedError",
            "The software accelerator has no npu_fusion_attention; use attn_implementation='eager'.",
            "capability",
            "npu_fusion_attention",
        ),
        (
            "ValueError",
            "FlexAttention is only supported on CUDA, CPU, HPU, or MPS devices. Found input tensors on npu device.",
            "capability",
            "FlexAttention",
        ),
        ("InductorError", "KeyError: 'npu'\n\nSet TORCHDYNAMO_VERBOSE=1 for", "capability", "torch.compile"),
        ("KeyError", "'npu'", "branch", "'npu'"),
        ("RuntimeError", "Backend hccl does not support alltoall", "capability", "alltoall"),
        ("RuntimeError", "PyTorch is not linked with support for npu devices", "capability", "guards"),
        (
            "RuntimeError",
            "You should register `PrivateUse1HooksInterface`by `RegisterPrivateUse1HooksInterface` and implement "
            "`getPinnedMemoryAllocator` at the same time for PrivateUse1.",
            "capability",
            "getPinnedMemoryAllocator of PrivateUse1's hooks",
        ),
        (
            "AttributeError",
            "'NPU_Accelerator' object has no attribute 'is_fused'",
            "branch",
            "NPU_Accelerator.is_fused",
        ),
        ("AttributeError", "'device' object has no attribute 'type'", "branch", "torch.npu.device.type"),
        (
            "NotImplementedError",
            NO_CPU_KERNEL,
            "operator",
            "aten::_thnn_fused_lstm_cell",
        ),
        ("NotImplementedError", "\"lu_cpu\" not implemented for 'Half'", "operator", "lu_cpu for Half"),
        ("AssertionError", "Torch not compiled with CUDA enabled", "capability", "CUDA"),
        ("RuntimeError", "Found no NVIDIA driver on your system. Please check that you", "capability", "CUDA"),
        ("RuntimeError", "0 active drivers ([]). There should only be one.", "capability", "Triton"),
    ],
)
def test_what_is_missing_is_named(type_name: str, message: str, what: str, name: str) -> None:
    found = of_failure(type_name, message, f"Traceback (most recent call last):\n{type_name}: {message}", torch="2.9.1")
    assert found is not None
    assert (found.what.value, found.name, found.torch) == (what, name, "2.9.1")
    assert found.describe().startswith(
        f"This is a limit of the software accelerator ({what} {name}, torch 2.9.1), not of the library: "
    )
    assert found.describe().endswith(". Report it to pytest-trlcompat, or test on a GPU with --trlcompat-device cuda.")
    for issue in known_issues.load().values():
        assert not issue.shows((type_name, "Exception"), message), f"the symptom of {issue.id} is an artefact's"


@pytest.mark.parametrize(
    ("type_name", "message"),
    [
        # A GPU refuses these in the same words, but for its name.
        ("RuntimeError", "Expected all tensors to be on the same device, but got mat2 is on cpu, different from npu:0"),
        ("RuntimeError", "Expected a 'npu:0' device type for generator but found 'cpu'"),
        ("RuntimeError", "No backend type associated with device type cpu"),
        ("RuntimeError", "invalid device ordinal 3: the software accelerator has 2 device(s), npu:0 to npu:1 (X sets)"),
        ("RuntimeError", "Inconsistent compute device and `device_id` on rank 1: npu:0 vs npu:1"),
        ("KeyError", "'npu:0'"),
        ("KeyError", "True"),
        ("AttributeError", "'Qwen2ForCausalLM' object has no attribute 'optimizer'"),
        ("ModuleNotFoundError", "No module named 'vllm_ascend'"),
        ("NotImplementedError", "generate is not implemented for this model"),
        ("ValueError", "DistributedType.MULTI_NPU needs more than one process"),
        ("RuntimeError", "probability tensor contains either `inf`, `nan` or element < 0"),
    ],
)
def test_what_a_gpu_would_say_as_well_is_no_artefact(type_name: str, message: str) -> None:
    assert of_failure(type_name, message, f"Traceback (most recent call last):\n{type_name}: {message}") is None


SYMPTOMS = [(issue.id, symptom) for issue in known_issues.load().values() for symptom in issue.symptoms]


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.data())
def test_no_known_symptom_is_an_artefact(data: st.DataObject) -> None:
    """Texts made from the patterns of the catalogue, each with the type that it names."""
    issue, symptom = data.draw(st.sampled_from(SYMPTOMS))
    message = data.draw(st.from_regex(symptom.pattern, fullmatch=True))
    text = f"Traceback (most recent call last):\n{symptom.type_name}: {message}"
    assert of_failure(symptom.type_name, message, text) is None, issue
    assert in_text(f"{symptom.type_name}: {message}") is None, issue


# ---- by the place

Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs ``call()`` of modules that lie where packages are installed; returns the traceback that it ends in."""

    def run(**sources: str) -> str:
        names: dict[str, object] = {}
        for name, source in sources.items():
            path = tmp_path / "site-packages" / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(source).lstrip("\n"))
            exec(compile(path.read_text(), str(path), "exec"), names)
        try:
            names["call"]()  # type: ignore[operator]
        except Exception:
            return traceback.format_exc()
        raise AssertionError("it was to fail")

    return run


# transformers 4.56.2, trainer.py: Trainer._load_rng_state, and what it calls.
RNG_STATE = """
    def is_torch_npu_available():
        return True

    def set_rng_state_for_device(device_name, device_module, checkpoint_rng_state, is_distributed):
        device_state_key = device_name.lower()
        err_template = "Didn't manage to set back the RNG states"
        raise RuntimeError(f"{{err_template}} of {{device_state_key}}")

    def call():
        if is_torch_npu_available():
            {body}
"""


def test_a_line_that_only_npus_run_is_an_artefact(run: Run) -> None:
    text = run(transformers__trainer=RNG_STATE.format(body="set_rng_state_for_device('NPU')"))
    found = of_failure("TypeError", "missing 3 arguments", text, torch="2.13.0")
    assert found == Artefact(
        What.BRANCH,
        "transformers/trainer.py:11",
        "no GPU goes there, only where is_torch_npu_available() in call",
        "2.13.0",
    )


def test_what_is_called_from_there_runs_on_gpus_too(run: Run) -> None:
    text = run(transformers__trainer=RNG_STATE.format(body="set_rng_state_for_device('NPU', None, {}, False)"))
    assert "line 11, in call" in text
    assert of_failure("RuntimeError", "Didn't manage to set back the RNG states of npu", text) is None


@pytest.mark.parametrize("path", ["torch__serialization", "torch_npu__npu"])
def test_errors_of_torch_and_the_stand_in_count_for_the_line_that_calls_them(run: Run, path: str) -> None:
    callee = "def load(file):\n    raise ValueError('no such file')\n"
    text = run(**{path: callee}, transformers__trainer=RNG_STATE.format(body="load('x')"))
    found = of_failure("ValueError", "no such file", text)
    assert found is not None
    assert found.name == "transformers/trainer.py:11"


def test_a_file_for_npus_is_one_whatever_its_lines_say(run: Run) -> None:
    text = run(
        deepspeed__accelerator__npu_accelerator="def device_name(index):\n    return 'npu:' + index\n",
        deepspeed__runtime__engine="def call():\n    return device_name(0)\n",
    )
    found = of_failure("TypeError", 'can only concatenate str (not "int") to str', text)
    assert found is not None
    assert (found.what, found.name) == (What.BRANCH, "deepspeed/accelerator/npu_accelerator.py:2")


@pytest.mark.parametrize(
    "line",
    [
        "int('x') if is_npu_available() else int('y')",  # which of the two it was cannot be seen
        "is_npu_available() and int('x')",
        "[int('x') for device in ['npu'] if device == 'npu']",
    ],
)
def test_lines_that_others_share_prove_nothing(run: Run, line: str) -> None:
    text = run(trl__utils=f"def is_npu_available():\n    return True\n\ndef call():\n    return {line}\n")
    assert of_failure("ValueError", "invalid literal for int()", text) is None


def test_an_else_that_tensors_on_the_cpu_take_too_proves_nothing(run: Run) -> None:
    source = """
        def call(device='npu'):
            if device == 'cuda':
                return 1
            else:
                return int('x')
    """
    assert of_failure("ValueError", "invalid literal for int()", run(trl__utils=source)) is None


def test_a_file_that_is_not_here_proves_nothing(run: Run, tmp_path: Path) -> None:
    text = run(transformers__trainer=RNG_STATE.format(body="int('x')"))
    (tmp_path / "site-packages" / "transformers" / "trainer.py").unlink()
    assert of_failure("ValueError", "invalid literal for int()", text) is None


# ---- what led to what

CHAIN = """
    def kernel():
        raise NotImplementedError("Could not run 'aten::foo' with arguments from the 'npu' backend.")

    def call():
        try:
            kernel()
        except NotImplementedError{name}:
            {handler}
"""


@pytest.mark.parametrize("handler", ["raise RuntimeError('cannot save') from error", "int('x')"])
def test_what_an_artefact_leads_to_is_one(run: Run, handler: str) -> None:
    text = run(trl__utils=CHAIN.format(name=" as error", handler=handler))
    found = of_failure("RuntimeError", "cannot save", text)
    assert found is not None
    assert found.name == "aten::foo for npu"


def test_an_artefact_that_was_dealt_with_is_none(run: Run) -> None:
    text = run(trl__utils=CHAIN.format(name="", handler="pass").rstrip() + "\n        int('x')\n")
    assert "aten::foo" not in text
    assert of_failure("ValueError", "invalid literal for int()", text) is None


# ---- as texts

ARTEFACT = Artefact(What.OPERATOR, "aten::foo for npu", "it has no such kernel", "2.9.1+cu128")


def test_a_description_is_read_back() -> None:
    text = f"RuntimeError: boom [{ARTEFACT.describe()}] and more"
    assert in_text(text) == ARTEFACT
    assert in_text(textwrap.fill(text, 60)) == ARTEFACT
    assert of_failure("LaunchError", text, "") == ARTEFACT
    without = Artefact(What.BRANCH, "trl/utils.py:3", "no GPU goes there, only where is_npu() in f (g)")
    assert in_text(without.describe()) == without
    assert in_text("RuntimeError: limits of the accelerator") is None


def test_a_text_alone_says_only_what_nobody_else_says() -> None:
    assert in_text("NotImplementedError: " + NO_KERNEL) is not None
    assert in_text("AssertionError: Torch not compiled with CUDA enabled") is None
    assert in_text("NotImplementedError: \"lu_cpu\" not implemented for 'Half'") is None


def test_without_the_accelerator_nothing_is_its_artefact() -> None:
    error = NotImplementedError(NO_KERNEL)
    assert of_exception(error) is None
    assert error_text(error, limit=20) == "NotImplementedError: Could not run 'aten:"


def test_in_a_process_with_the_device_a_failure_has_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(artefacts, "in_force", lambda: True)  # stands for a rank that has loaded the device
    described = error_text(NotImplementedError(NO_KERNEL), limit=20)
    assert described.startswith(
        "NotImplementedError: Could not run 'aten: [This is a limit of the software accelerator ("
    )
    found = in_text(described)
    assert found is not None
    assert found.name == "aten::_sparse_mm_reduce_impl for SparseCsrnpu"
    assert printed_in(f"before\n{capsys.readouterr().err}after") == found
    assert error_text(ValueError("x")) == "ValueError: x"
    assert capsys.readouterr().err == ""


def test_a_failure_has_the_functions_that_it_was_raised_in() -> None:
    with pytest.raises(ValueError, match="invalid literal") as caught:
        int("x")
    name = "test_a_failure_has_the_functions_that_it_was_raised_in"
    said = "ValueError: invalid literal for int() with base 10: 'x'"
    assert error_text(caught.value) == f"{said} (in test_artefacts.py:{name})"


def test_an_exception_without_a_text_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise TypeError("no")

    monkeypatch.setattr(artefacts, "in_force", lambda: True)
    assert error_text(Mute()) == "Mute: <Mute whose text cannot be had: TypeError>"


# ---- all that a program printed

TRACEBACK = (
    f'Traceback (most recent call last):\n  File "/a/b.py", line 3, in f\n    g()\nNotImplementedError: {NO_KERNEL}\n'
)
ANOTHER = 'Traceback (most recent call last):\n  File "/a/b.py", line 9, in f\n    h()\nValueError: another\n'
TORCHRUN = (
    'Traceback (most recent call last):\n  File "/t/run.py", line 9, in f\n    h()\n'
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n====\ntrain.py FAILED\n"
)


@pytest.mark.parametrize(
    ("output", "ended"),
    [
        (f"step 1\n{TRACEBACK}", True),
        ("".join(f"[rank0]: {line}\n" for line in TRACEBACK.splitlines()), True),
        (f"{TRACEBACK}{TORCHRUN}", True),
        (f"{TRACEBACK}\nDuring handling of the above exception, another exception occurred:\n\n{ANOTHER}", True),
        (f"__ test ___\ntest_x.py:3: in test\n    g()\nE   NotImplementedError: {NO_KERNEL}\n=== 1 failed ===\n", True),
        (f"E   pytest_trlcompat.launch.result.LaunchError: failed\nE   {ARTEFACT.describe()}\n=== 1 failed ===", True),
        (f"{TRACEBACK}going on without it\n{ANOTHER}", False),
        (f"{ANOTHER}{TORCHRUN}", False),
        (f"a warning: {NO_KERNEL}\nexit\n", False),
        ("", False),
    ],
)
def test_what_ended_a_program(output: str, ended: bool) -> None:
    assert (of_program(output) is not None) is ended
