"""Settings: precedence, sources, refusals; and which device is in force."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from pytest_trlcompat import launch
from pytest_trlcompat.plugin import settings
from pytest_trlcompat.plugin.settings import Device, Setting, SettingError, Source

Read = Callable[..., settings.Settings]


@pytest.fixture
def read(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Read:
    """Read the settings of a pytest run with an ini file, environment variables and arguments."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def read(*arguments: str, ini: str = "", environ: Mapping[str, str] | None = None) -> settings.Settings:
        pytester.makeini(f"[pytest]\n{ini}")
        config = pytester.parseconfig("-p", "pytest_trlcompat.plugin", *arguments)
        return settings.read_settings(config, environ or {})

    return read


def test_defaults(read: Read) -> None:
    found = read()
    assert found.device == Setting("auto", Source.DEFAULT, "default")
    assert (found.results.value, found.resume.value, found.issue.value) == (None, False, ())
    assert found.timeout.value == launch.DEFAULT_TIMEOUT
    assert found.changed() == {}


def test_the_option_wins_over_the_environment_and_the_environment_over_the_ini_file(read: Read) -> None:
    ini, environ = "trlcompat_timeout = 30", {"TRLCOMPAT_TIMEOUT": "20"}
    assert read("--trlcompat-timeout=10", ini=ini, environ=environ).timeout == Setting(
        10.0, Source.OPTION, "option --trlcompat-timeout"
    )
    assert read(ini=ini, environ=environ).timeout == Setting(20.0, Source.ENVIRONMENT, "environment TRLCOMPAT_TIMEOUT")
    assert read(ini=ini).timeout == Setting(30.0, Source.INI, "ini trlcompat_timeout")
    assert read(ini=ini, environ={"TRLCOMPAT_TIMEOUT": ""}).timeout.value == 30.0


def test_every_setting_can_come_from_every_source(read: Read, pytester: pytest.Pytester) -> None:
    file = pytester.path / "sub" / "out.jsonl"
    by_option = read(
        "--trlcompat-device=cpu",
        f"--trlcompat-results={file}",
        "--trlcompat-resume",
        "--trlcompat-issue=a",
        "--trlcompat-issue=b",
        "--trlcompat-subject=upstream",
        "--trlcompat-trainer=a.b:C d:E",
        "--trlcompat-timeout=1.5",
        "--trlcompat-preload=a.b c",
        "--trlcompat-preload=d",
        "--trlcompat-debug-rank=1",
    )
    by_environment = read(
        environ={
            "TRLCOMPAT_DEVICE": "cpu",
            "TRLCOMPAT_RESULTS": str(file),
            "TRLCOMPAT_RESUME": "1",
            "TRLCOMPAT_ISSUE": "a b",
            "TRLCOMPAT_SUBJECT": "upstream",
            "TRLCOMPAT_TRAINER": "a.b:C d:E",
            "TRLCOMPAT_TIMEOUT": "1.5",
            "TRLCOMPAT_PRELOAD": "a.b c d",
            "TRLCOMPAT_DEBUG_RANK": "1",
        }
    )
    by_ini = read(
        ini="trlcompat_device = cpu\ntrlcompat_results = sub/out.jsonl\ntrlcompat_resume = true\n"
        "trlcompat_issue =\n    a\n    b\n"
        "trlcompat_subject = upstream\ntrlcompat_trainer = a.b:C\n    d:E\ntrlcompat_timeout = 1.5\n"
        "trlcompat_preload = a.b c\n    d\n"
        "trlcompat_debug_rank = 1"
    )
    expected = {
        **{"device": "cpu", "results": file, "resume": True, "issue": ("a", "b"), "subject": "upstream"},
        "trainer": ("a.b:C", "d:E"),
        "timeout": 1.5,
        "preload": ("a.b", "c", "d"),
        "debug_rank": 1,
    }
    for found, source in ((by_option, Source.OPTION), (by_environment, Source.ENVIRONMENT), (by_ini, Source.INI)):
        assert {name: setting.value for name, setting in found.changed().items()} == expected
        assert {setting.source for setting in found.changed().values()} == {source}


def test_the_results_file_is_found_from_the_working_directory_and_in_the_ini_file_from_the_ini_file(
    read: Read, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = pytester.mkdir("elsewhere")
    monkeypatch.chdir(elsewhere)
    ini = f"--config-file={pytester.path / 'tox.ini'}"
    assert read(ini, "--trlcompat-results=out.jsonl").results.value == elsewhere / "out.jsonl"
    assert read(ini, ini="trlcompat_results = out.jsonl").results.value == pytester.path / "out.jsonl"


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--trlcompat-device=tpu"], "option --trlcompat-device: invalid value 'tpu'; choose one of auto, software,"),
        (
            ["--trlcompat-timeout=0"],
            "option --trlcompat-timeout: invalid value '0'; write a positive number of seconds",
        ),
        (
            ["--trlcompat-trainer=mine"],
            "option --trlcompat-trainer: invalid value ['mine']; write the module and the",
        ),
        (["--trlcompat-subject=trl"], "option --trlcompat-subject: invalid value 'trl'; choose one of upstream, "),
        (["--trlcompat-timeout=inf"], "invalid value 'inf'; write a positive number of seconds"),
        (["--trlcompat-timeout=soon"], "invalid value 'soon'; write a positive number of seconds"),
        (["--trlcompat-results=."], "option --trlcompat-results: invalid value '.'; this is a folder"),
        (["--trlcompat-issue="], "option --trlcompat-issue: invalid value ['']; write the id of a known issue"),
    ],
)
def test_a_bad_value_is_refused_with_its_place(read: Read, arguments: list[str], text: str) -> None:
    with pytest.raises(SettingError) as caught:
        read(*arguments)
    assert text in str(caught.value)


def test_a_bad_value_in_the_environment_or_the_ini_file_is_refused_with_its_place(read: Read) -> None:
    with pytest.raises(
        SettingError, match="^environment TRLCOMPAT_RESUME: invalid value 'maybe'; write true or false$"
    ):
        read(environ={"TRLCOMPAT_RESUME": "maybe"})
    with pytest.raises(SettingError, match="^ini trlcompat_device: invalid value 'gpu'; choose one of auto, "):
        read(ini="trlcompat_device = gpu")
    with pytest.raises(SettingError, match="^ini trlcompat_resume: "):
        read(ini="trlcompat_resume = maybe")


@pytest.mark.parametrize("name", ["software", "cpu"])
def test_a_device_without_requirements_is_used_as_requested(name: str) -> None:
    requested = Setting(name, Source.OPTION, "option --trlcompat-device")
    assert settings.resolve_device(requested) == Device(name, why="")


def test_auto_takes_cuda_where_it_can_and_says_why_not() -> None:
    assert settings.resolve_device(Setting("auto"), lambda: None).name == "cuda"
    software = settings.resolve_device(Setting("auto"), lambda: "there is no NVIDIA device")
    assert (software.name, software.why) == ("software", "there is no NVIDIA device")


def test_cuda_is_never_replaced_silently() -> None:
    requested = Setting("cuda", Source.INI, "ini trlcompat_device")
    assert settings.resolve_device(requested, lambda: None).name == "cuda"
    with pytest.raises(SettingError) as caught:
        settings.resolve_device(requested, lambda: "there is no NVIDIA device")
    assert str(caught.value) == (
        "ini trlcompat_device requests 'cuda', but there is no NVIDIA device; "
        "install a CUDA build of torch on a machine with an NVIDIA GPU, or choose 'software' or 'auto'"
    )


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    """A device folder as the NVIDIA driver fills it."""
    folder = tmp_path / "dev"
    folder.mkdir()
    for name in ("nvidiactl", "nvidia-uvm", "nvidia0"):
        (folder / name).touch()
    return folder


def install_torch(folder: Path, monkeypatch: pytest.MonkeyPatch, cuda: str) -> None:
    package = folder / "site" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "version.py").write_text(
        f"from typing import Optional\n\n__version__ = '2.13.0'\ncuda{cuda}\nhip = None\n"
    )
    monkeypatch.syspath_prepend(package.parent)


@pytest.mark.parametrize("cuda", [": Optional[str] = '12.8'", " = '13.0'"])
def test_cuda_can_be_used_with_a_device_and_a_cuda_build(
    cuda: str, devices: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_torch(tmp_path, monkeypatch, cuda)
    assert settings.cuda_obstacle({}, devices) is None
    assert settings.cuda_obstacle({"CUDA_VISIBLE_DEVICES": "0"}, devices) is None


@pytest.mark.parametrize("cuda", [": Optional[str] = None", " = None", "ncel = True"])
def test_a_cpu_build_of_torch_is_an_obstacle(
    cuda: str, devices: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_torch(tmp_path, monkeypatch, cuda)
    obstacle = settings.cuda_obstacle({}, devices)
    assert obstacle is not None
    assert obstacle.endswith("is not a CUDA build")


def test_no_device_and_hidden_devices_are_obstacles(devices: Path) -> None:
    assert settings.cuda_obstacle({"CUDA_VISIBLE_DEVICES": ""}, devices) == "CUDA_VISIBLE_DEVICES= hides every GPU"
    assert settings.cuda_obstacle({"CUDA_VISIBLE_DEVICES": "-1"}, devices) == "CUDA_VISIBLE_DEVICES=-1 hides every GPU"
    (devices / "nvidia0").unlink()  # the driver is loaded, but there is no GPU
    assert settings.cuda_obstacle({}, devices) == "there is no NVIDIA device"


def test_torch_that_is_not_installed_is_an_obstacle(devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert settings.cuda_obstacle({}, devices) == "torch is not installed"
