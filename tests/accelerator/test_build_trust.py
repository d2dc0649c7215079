"""A build that somebody else could have changed is not loaded, and one that is broken is built again."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_trlcompat.accelerator import AcceleratorError, build
from pytest_trlcompat.launch.cluster import Cluster
from pytest_trlcompat.launch.environment import base_environment

from .building import MODULE, Site

ROOT_ALONE = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
ADVICE = "It is not loaded. Let TRLCOMPAT_CACHE name a folder that, with all above it, only you and root can write to."


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def refusal(site: Site) -> str:
    calls = site.calls
    with pytest.raises(AcceleratorError) as raised:
        build()
    assert site.calls == calls  # nothing was compiled either
    text = str(raised.value)
    assert f", so another user could have changed the software accelerator in {site.cache}/accelerator/" in text
    assert text.endswith(ADVICE)
    return text


def truncate(folder: Path) -> None:
    (folder / "torch_npu" / "_C.so").write_bytes(b"")


def flip(folder: Path) -> None:
    data = bytearray((folder / "torch_npu" / "_C.so").read_bytes())
    data[-1] ^= 1
    (folder / "torch_npu" / "_C.so").write_bytes(data)


def change_module(folder: Path) -> None:
    with (folder / "torch_npu" / "__init__.py").open("a") as file:
        file.write("import os\n")


def remove_module(folder: Path) -> None:
    (folder / "torch_npu" / "__init__.py").unlink()


def break_test_result(folder: Path) -> None:
    (folder / "self-test.json").write_text("{")


def break_sums(folder: Path) -> None:
    (folder / "SHA256SUMS").write_text("../../x\n")


def empty_sums(folder: Path) -> None:
    (folder / "SHA256SUMS").write_text("")


@pytest.mark.fault(
    "A file of the compiled accelerator is empty, changed or missing.", "It is named, and compiled again, once."
)
@pytest.mark.parametrize(
    "harm, named",
    [
        (truncate, "torch_npu/_C.so"),
        (flip, "torch_npu/_C.so"),
        (change_module, "torch_npu/__init__.py"),
        (remove_module, "torch_npu/__init__.py"),
        (break_test_result, "self-test.json"),
        (break_sums, "SHA256SUMS"),
        (empty_sums, "SHA256SUMS"),
    ],
)
def test_a_broken_build_is_built_again(site: Site, harm: Callable[[Path], None], named: str) -> None:
    folder = build()
    whole = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    harm(folder)
    said: list[str] = []
    assert build(progress=said.append) == folder
    assert said[0] == f"{folder / named} is missing or broken; it is built again"
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == whole
    assert site.calls == 2
    build(progress=said.append)
    assert site.calls == 2
    assert len(said) == 3


@pytest.mark.fault(
    "Three processes find a broken build of the accelerator at once.", "One compiles it, and the others wait for it."
)
def test_of_several_that_find_it_broken_one_compiles(site: Site) -> None:
    (folder,) = {build()}
    truncate(folder)
    site.compiler("time.sleep(1)")
    started = [site.start() for _ in range(3)]
    outputs = [process.communicate(timeout=60) for process in started]
    assert [process.returncode for process in started] == [0] * 3, outputs
    assert site.calls == 2
    assert sum("is missing or broken" in errors for _, errors in outputs) == 1


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o077])
def test_nobody_else_can_write_to_a_build_whatever_the_umask(site: Site, mask: int) -> None:
    with umask(mask):
        folder = build()
        assert build() == folder
    assert site.calls == 1
    paths = [folder, *(path for path in folder.rglob("*"))]
    assert [path.name for path in paths if path.stat().st_mode & 0o022] == []
    assert [oct(path.stat().st_mode & 0o777) for path in (site.cache, site.cache / "accelerator")] == [
        oct(0o755 & ~mask)
    ] * 2


@pytest.mark.fault(
    "Every user can write to a folder above the compiled accelerator.",
    "Nothing is loaded and nothing compiled; the error names the folder and what to do.",
)
@pytest.mark.parametrize("built", [False, True])
@pytest.mark.parametrize("mode", [0o777, 0o757])
def test_a_folder_that_all_can_write_to_is_refused(site: Site, mode: int, built: bool) -> None:
    if built:
        build()
    site.cache.mkdir(exist_ok=True)
    site.cache.chmod(mode)
    assert refusal(site).startswith(f"every user can write to {site.cache} (mode {mode:04o}), so ")


def test_a_file_that_all_can_write_to_is_refused(site: Site) -> None:
    library = build() / "torch_npu" / "_C.so"
    library.chmod(0o666)
    assert refusal(site).startswith(f"every user can write to {library} (mode 0666), so ")


def test_the_sticky_bit_protects_what_is_in_a_shared_folder_but_not_the_build_itself(site: Site) -> None:
    site.cache.mkdir()
    site.cache.chmod(0o1777)
    folder = build()
    assert build() == folder
    folder.chmod(0o1777)
    assert refusal(site).startswith(f"every user can write to {folder} (mode 1777), so ")


@pytest.mark.parametrize("members, accepted", [([], True), (["me"], True), (["me", "you"], False)])
def test_a_group_counts_as_its_only_member(
    site: Site, monkeypatch: pytest.MonkeyPatch, members: list[str], accepted: bool
) -> None:
    group = (site.root.stat().st_gid, "me", members)
    user = pwd.struct_passwd(("me", "x", os.geteuid(), group[0], "", "", ""))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: user)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group(("me", "x", gid, members)))
    build()
    site.cache.chmod(0o775)
    if accepted:
        build()
    else:
        assert refusal(site).startswith(f"the group me can write to {site.cache} (mode 0775), so ")


@pytest.mark.fault(
    "Another user has put a folder where the compiled accelerator is expected.",
    "It is not loaded; the error names the folder and its owner.",
)
@ROOT_ALONE
@pytest.mark.parametrize("which", ["the build", "the cache", "a module"])
def test_what_belongs_to_another_user_is_refused(site: Site, which: str) -> None:
    folder = build()
    path = {"the build": folder, "the cache": site.cache, "a module": folder / "torch_npu" / "npu"}[which]
    nobody = pwd.getpwnam("nobody")
    os.chown(path, nobody.pw_uid, nobody.pw_gid)
    assert refusal(site).startswith(f"{path} belongs to user nobody, so ")


@ROOT_ALONE
def test_roots_cache_serves_every_user(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that becomes the user ``nobody`` is given root's build, which it cannot write to."""
    nobody = pwd.getpwnam("nobody")
    found = MODULE.find_torch()
    monkeypatch.setattr(MODULE, "find_torch", lambda: found)  # pytest's own folder is closed to others
    with tempfile.TemporaryDirectory() as cache:
        os.chmod(cache, 0o755)
        folder = build(cache=cache)
        child = os.fork()
        if child == 0:
            os.setgroups([])
            os.setgid(nobody.pw_gid)
            os.setuid(nobody.pw_uid)
            try:
                assert build(cache=cache) == folder
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert site.calls == 1


def test_extensions_are_not_compiled_where_another_user_could_change_them(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    folder = Path(base_environment("cpu", Cluster())["TORCH_EXTENSIONS_DIR"])
    assert folder.parent == site.cache / "torch_extensions"
    assert oct(folder.stat().st_mode & 0o777) == "0o755"
    folder.chmod(0o777)
    with pytest.raises(AcceleratorError) as raised:
        base_environment("cpu", Cluster())
    assert str(raised.value) == (
        f"every user can write to {folder} (mode 0777), so another user could change the extensions that PyTorch "
        f"compiles into {folder}. Let TRLCOMPAT_CACHE name a folder that, with all above it, only you and root can "
        "write to, or set TORCH_EXTENSIONS_DIR."
    )
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/own")
    assert base_environment("cpu", Cluster())["TORCH_EXTENSIONS_DIR"] == "/own"
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    shutil.rmtree(site.cache / "torch_extensions")
    (site.cache / "torch_extensions").touch()  # it cannot be made
    assert "TORCH_EXTENSIONS_DIR" in base_environment("cpu", Cluster())
