"""The libraries that a CUDA build of torch needs and a CPU build does not, kept separately from the locks of cells.

On Linux, the package index has CUDA builds of torch, while uv's ``--torch-backend cpu`` and many wheel folders give CPU
builds. The lock of a cell serves both: the additional libraries are locked once for each torch, and installed only with
a CUDA build.
"""

from __future__ import annotations

import datetime
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from pytest_trlcompat.matrix.cells import Matrix
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.files import write_whole
from pytest_trlcompat.matrix.hashes import RELEASE
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.parsing import parse_day
from pytest_trlcompat.matrix.uv import WHEELS_ONLY, uv_network_first

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["LEFT_OUT", "CudaLibraries", "is_cuda_build", "kept", "libraries_of", "renew", "strays"]

TRITON = "triton"
"""Not installed unless a cell needs it: nothing else on a CPU does, and a lock must give the same verdicts with either
build of torch."""

_BASES = (
    *("cublas", "cuda-cccl", "cuda-crt", "cuda-cupti", "cuda-nvcc", "cuda-nvrtc", "cuda-runtime", "cudnn"),
    *("cudnn-frontend", "cufft", "cufile", "curand", "cusolver", "cusparse", "cusparselt", "nccl", "nvjitlink"),
    *("nvshmem", "nvtx", "nvvm"),
)
_EDITIONS = ("", "-cu11", "-cu12", "-cu13", "-cu14")

LEFT_OUT = (
    *("cuda-bindings", "cuda-pathfinder", "cuda-python", "cuda-toolkit", TRITON),
    *(f"nvidia-{base}{edition}" for base in _BASES for edition in _EDITIONS),
)
"""Packages that are excluded when a cell is resolved, with either build of torch.

They are listed by name, since torch's metadata do not mark them, and not every ``nvidia-*`` package belongs to CUDA:
DeepSpeed needs ``nvidia-ml-py``.
"""

_OF_CUDA = re.compile(r"(cuda|nvidia)-.+")
_HEADER = re.compile(r"^# (torch|date|wheel): (\S+)", re.MULTILINE)
_LINE = re.compile(rf"(?P<release>{RELEASE.pattern})  # (?P<size>\d+) bytes")
# Builds for CPUs assign None there, without quotes: ``cuda: Optional[str] = None``.
_BUILT_FOR_CUDA = re.compile(r"^cuda\b[^=]*= *['\"]", re.MULTILINE)


@dataclass(frozen=True)
class CudaLibraries:
    """The libraries that the package index's build of one torch needs; none if that is not a CUDA build.

    Attributes:
        date: the day as of which they were resolved.
        packages: canonical name to version.
        sizes: of their wheels and that of torch itself, in bytes, by canonical name; 0 if the index does not say.
    """

    torch: str
    date: datetime.date
    packages: Mapping[str, str]
    sizes: Mapping[str, int]

    @property
    def requirements(self) -> list[str]:
        return [f"{name}=={version}" for name, version in self.packages.items()]

    def to_text(self) -> str:
        return "\n".join(
            [
                "# What the CUDA build of one torch needs beside the lock of a cell, Triton left out;",
                "# installed beside such a build alone. Sizes are those of the wheels. `nox -s lock` renews it.",
                f"# torch: {self.torch}",
                f"# date: {self.date.isoformat()}",
                f"# wheel: {self.sizes.get('torch', 0)} bytes",
                *(f"{name}=={version}  # {self.sizes.get(name, 0)} bytes" for name, version in self.packages.items()),
                "",
            ]
        )


def is_cuda_build(site_packages: Path) -> bool:
    """Whether the torch installed there was built for CUDA, read from its ``version.py`` without importing it."""
    try:
        text = (site_packages / "torch" / "version.py").read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
    return _BUILT_FOR_CUDA.search(text) is not None


def libraries_of(torch: str, python: str, layout: Layout) -> CudaLibraries:
    """The libraries of the CUDA build of a torch: locked in the repository, else resolved before, else resolved now.

    Raises:
        Untestable: when it cannot be resolved; the text is the resolver's reason.
    """
    for folder in (layout.locks, layout.resolved):
        if _path(folder, torch).is_file():
            return _read(_path(folder, torch))
    libraries = _resolve(torch, python)
    write_whole(_path(layout.resolved, torch), libraries.to_text())
    return libraries


def kept(torch: str, layout: Layout) -> bool:
    """Whether the libraries of a torch are locked in the repository."""
    return _path(layout.locks, torch).is_file()


def renew(matrix: Matrix, torch: str, layout: Layout) -> CudaLibraries:
    """Lock the libraries of a release of torch in the repository, resolved as of its date plus ``settle_days``.

    Raises:
        Untestable: when it cannot be resolved; the text is the resolver's reason.
    """
    libraries = _resolve(torch, matrix.python, matrix.torch[torch] + datetime.timedelta(days=matrix.settle_days))
    write_whole(_path(layout.locks, torch), libraries.to_text())
    return libraries


def strays(matrix: Matrix, layout: Layout) -> list[Path]:
    """Files of releases of torch that are not in the matrix."""
    known = {_path(layout.locks, torch) for torch in matrix.torch}
    return [path for path in sorted(_path(layout.locks, "").parent.glob("*.txt")) if path not in known]


def _path(folder: Path, torch: str) -> Path:
    return folder / "cuda" / f"torch{torch}.txt"


def _resolve(torch: str, python: str, day: datetime.date | None = None) -> CudaLibraries:
    """Resolve with the package index, as of ``day`` or today."""
    day = day or datetime.datetime.now(datetime.timezone.utc).date()
    answer = uv_network_first(
        [
            # Of uv's formats this one states the sizes of files.
            *("pip", "compile", "-", "--quiet", "--no-header", "--format", "pylock.toml", "--python", python),
            *("--exclude-newer", f"{day.isoformat()}T00:00:00Z"),
            *WHEELS_ONLY,
        ],
        stdin=f"torch=={torch}",
        # A wheel folder of the user's may hold a build for CPUs, which requires none of these.
        index_alone=True,
    )
    packages: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for package in tomllib.loads(answer).get("packages", []):
        name = canonicalize_name(package["name"])
        if name == "torch" or _OF_CUDA.fullmatch(name):
            sizes[name] = _size(package)
        if _OF_CUDA.fullmatch(name):
            packages[name] = package["version"]
    return CudaLibraries(torch, day, dict(sorted(packages.items())), sizes)


def _size(package: Mapping[str, Any]) -> int:
    """The size of the largest wheel; those for other platforms are smaller."""
    return max((int(wheel.get("size", 0)) for wheel in package.get("wheels", [])), default=0)


def _read(path: Path) -> CudaLibraries:
    text = path.read_text(encoding="utf-8")
    header = dict(_HEADER.findall(text))
    packages: dict[str, str] = {}
    sizes: dict[str, int] = {}
    try:
        sizes["torch"] = int(header["wheel"])
        for line in text.splitlines():
            if line.strip() and not line.startswith("#"):
                match = _LINE.fullmatch(line)
                if match is None:
                    raise MatrixError(f"{line!r} is not NAME==VERSION  # SIZE bytes")
                name, _, version = match["release"].partition("==")
                packages[name], sizes[name] = version, int(match["size"])
        return CudaLibraries(header["torch"], parse_day(header["date"]), packages, sizes)
    except (KeyError, ValueError, MatrixError) as error:
        raise MatrixError(
            f"{path}: damaged ({error}); remove it and create it again with: nox -s lock -- --missing"
        ) from error
