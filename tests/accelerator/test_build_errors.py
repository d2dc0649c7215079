"""What a build of the software accelerator says that cannot succeed: no compiler, no torch, no disk."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import os
import shutil
from pathlib import Path

import pytest

from pytest_trlcompat.accelerator import AcceleratorError, build, environment
from pytest_trlcompat.accelerator.build import find_torch

from .building import MODULE, PASSED, PERFORM, Site


def test_no_compiler(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(site.root))
    with pytest.raises(AcceleratorError) as raised:
        build(progress=lambda line: pytest.fail(f"announced: {line}"))
    text = str(raised.value)
    assert "no C++ compiler was found: CXX is not set, and none of g++, c++, clang++ is on PATH" in text
    assert "apt-get install g++" in text
    assert list((site.cache / "accelerator").glob("*.lock")), "the lock was taken and let go"


def test_cxx_names_no_program(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    with pytest.raises(AcceleratorError, match=r"names the C\+\+ compiler 'no-such-compiler', which was not found"):
        build()


def test_a_failing_compiler(site: Site) -> None:
    site.compiler("print(*range(1, 101), sep='\\n'); sys.exit(3)")
    with pytest.raises(AcceleratorError) as raised:
        build()
    text = str(raised.value)
    assert "could not compile the software accelerator for torch 2.99.0+cpu (exit status 3)" in text
    assert text.splitlines()[-21:-1] == [str(number) for number in range(81, 101)]
    assert text.splitlines()[-1] == (
        "It works with torch 2.4 to 2.15: use one of these, update pytest-trlcompat, or test on a GPU "
        "(--trlcompat-device cuda) or on the plain CPU (--trlcompat-device cpu)."
    )
    (log,) = (site.cache / "accelerator").glob("*.log")
    assert str(log) in text
    assert log.read_text().splitlines()[1:] == [str(number) for number in range(1, 101)]
    site.compiler()
    assert build().is_dir(), "a failure blocks no later build"


def test_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(AcceleratorError, match=r"is compiled against torch, and .* has no torch"):
        find_torch()


def test_a_torch_without_a_version(site: Site) -> None:
    (site.root / "torch" / "version.py").write_text("")
    with pytest.raises(AcceleratorError, match=r"does not name its version in version\.py"):
        find_torch()


@pytest.mark.parametrize("version", ["2.3.1", "2.3.1+cu121", "1.13.1"])
def test_a_torch_that_is_too_old(site: Site, version: str) -> None:
    site.make_torch(version)
    with pytest.raises(AcceleratorError) as raised:
        build()
    assert str(raised.value) == (
        f"The software accelerator was requested, but the installed torch is {version}. It works with torch 2.4 to "
        "2.15: use one of these, or test on a GPU (--trlcompat-device cuda) or on the plain CPU "
        "(--trlcompat-device cpu)."
    )
    assert site.calls == 0


def test_a_torch_that_cannot_be_imported(site: Site) -> None:
    (site.root / "torch" / "__init__.py").write_text("raise OSError('libcudart.so.12: cannot open')\n")
    with pytest.raises(AcceleratorError, match=r"cannot import it:\n(.*\n)*OSError: libcudart"):
        build()
    assert site.calls == 0


def test_a_build_that_does_not_work_is_refused_at_once_and_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real self-test, of a library that is the text of its own source."""
    monkeypatch.setattr(MODULE.self_test, "perform", PERFORM)
    for _ in range(2):
        with pytest.raises(AcceleratorError) as raised:
            build()
        text = str(raised.value)
        assert text.startswith(
            "The software accelerator was compiled for torch 2.99.0+cpu and does not work with it; this says nothing "
            "of your stack. Its self-test failed:\n  loading: the self-test ended with exit status 1:\nTraceback"
        )
        assert "It works with torch 2.4 to 2.15: use one of these, update pytest-trlcompat, or test on a GPU" in text
        assert text.endswith(" to build and test it again.")
    assert site.calls == 1


@pytest.mark.parametrize(
    ("printed", "failures"),
    [
        (
            '{"checks": {"a": null, "b": "SelfTestFailure: 1 instead of 2"}, "absent": {}}',
            ["  b: SelfTestFailure: 1 instead of 2"],
        ),
        ("a warning\n" + PASSED, []),
        ("Segmentation fault", ["  loading: the self-test ended with exit status -11:", "Segmentation fault"]),
        ("", ["  loading: the self-test ended with exit status -11:", ""]),
        ("[]", ["  loading: the self-test ended with exit status -11:", "[]"]),
    ],
)
def test_what_the_self_test_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str, failures: list[str]
) -> None:
    monkeypatch.setattr(MODULE.self_test._child, "run", lambda *_: (-11, printed))
    PERFORM(tmp_path, {})
    assert MODULE.self_test.read(tmp_path).describe().split("\n") == (failures or [""])


def test_a_torch_without_headers(site: Site) -> None:
    (site.root / "torch" / "include" / "torch" / "library.h").unlink()
    with pytest.raises(AcceleratorError, match=r"has no C\+\+ headers in"):
        build()


def test_a_python_without_headers(site: Site) -> None:
    (site.root / "python" / "Python.h").unlink()
    with pytest.raises(AcceleratorError, match=r"Python\.h is not in .*apt-get install python3-dev"):
        build()


FULL = r"The disk is too full to build the software accelerator in .*TRLCOMPAT_CACHE"


def test_a_full_disk_for_the_compiler(site: Site) -> None:
    site.compiler("print('fatal error: error writing to x.o: No space left on device'); sys.exit(1)")
    with pytest.raises(AcceleratorError, match=FULL):
        build()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_for_the_standin(site: Site, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fail(*_args: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(shutil, "copyfile", fail)
    with pytest.raises(AcceleratorError, match=FULL):
        build()


def test_a_cache_that_cannot_be_written(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    (site.root / "file").touch()
    monkeypatch.setenv("TRLCOMPAT_CACHE", str(site.root / "file"))
    with pytest.raises(AcceleratorError, match=r"cannot be built in .*Let TRLCOMPAT_CACHE name a writable folder"):
        build()


@pytest.mark.parametrize("devices", [0, 128])
def test_a_wrong_number_of_devices(site: Site, devices: int) -> None:
    with pytest.raises(AcceleratorError, match=f"{devices} software .* were requested; there can be 1 to 127 of them"):
        environment(devices=devices)
    assert site.calls == 0
