"""What a failed launch says where the software accelerator is to blame, and when it is. Results are made up here."""

from __future__ import annotations

import dataclasses

from pytest_trlcompat.accelerator.artefacts import Artefact, What
from pytest_trlcompat.launch import Failure, LaunchError, LaunchResult, RankResult

ARTEFACT = Artefact(What.OPERATOR, "aten::foo for npu", "it has no such kernel", "2.9.1")
PEER_GONE = Failure("RuntimeError", "Connection closed by peer [127.0.0.1]:2", "Traceback: gone", ("RuntimeError",))
LACKING = Failure("NotImplementedError", "Could not run", "Traceback: lacking", ("NotImplementedError",), ARTEFACT)
OTHER = Failure("ValueError", "wrong", "Traceback: other", ("ValueError",))

# What torch prints of an operator that kills the process: torch 2.13, an operator's own kernel for the CPU.
NATIVE = """SIGSEGV(11), PID: 9119, Thread 9119:
 frame #0: c10::FatalSignalHandler::stacktraceSignalHandler(bool) + 0x8f (0x7fdd85d90c4f in /e/torch/lib/libc10.so)
frame #1: <unknown function> + 0x167ad8 (0x7fdd88785ad8 in /lib/x86_64-linux-gnu/libc.so.6)
frame #2: trlcompat::fallback(c10::OperatorHandle const&, std::vector<IValue>*) + 0x1 (0x7f in /c/torch_npu/_C.so)
frame #3: <unknown function> + 0x5c233c4 (0x7fdd76e233c4 in /e/torch/lib/libtorch_cpu.so)
"""


def failed(*ranks: RankResult, timed_out: bool = False) -> LaunchResult:
    return LaunchResult("train", "ddp", "software", ranks, timed_out)


def rank(number: int, failure: Failure | None, ended_at: float = 0.0, **more: object) -> RankResult:
    return RankResult(rank=number, failure=failure, exit_status=1, ended_at=ended_at, **more)  # type: ignore[arg-type]


def test_the_first_thing_a_failed_launch_says_is_whose_limit_it_is() -> None:
    result = failed(rank(0, LACKING), rank(1, LACKING, 1.0))
    first, second, third, *_ = result.describe().splitlines()
    assert first.startswith("launch of train under ddp on 2 rank(s), device software failed; first observed failure: ")
    assert second == ARTEFACT.describe()
    assert third == "Traceback: lacking"
    assert LaunchError(result.describe(), result).artefact == ARTEFACT


def test_a_rank_that_only_noticed_another_ones_end_does_not_count() -> None:
    assert failed(rank(0, PEER_GONE), rank(1, LACKING, 1.0)).artefact == ARTEFACT
    assert failed(rank(0, PEER_GONE), rank(1, OTHER, 1.0)).artefact is None


def test_a_killed_rank_comes_before_those_that_saw_it_end() -> None:
    """Its end may be reaped later than another rank's error is raised."""
    killed = RankResult(rank=1, exit_status=-9, ended_at=2.0)
    assert failed(rank(0, PEER_GONE, 1.0), killed).root_cause is killed
    assert failed(rank(0, OTHER, 1.0), killed).root_cause == rank(0, OTHER, 1.0)
    ended = dataclasses.replace(killed, ended_by_launcher="the launch timed out")
    assert failed(rank(0, PEER_GONE, 1.0), ended).root_cause == rank(0, PEER_GONE, 1.0)


def test_what_failed_first_on_its_own_account_is_to_blame() -> None:
    result = failed(rank(0, OTHER), rank(1, LACKING, 1.0))
    assert result.artefact is None
    assert "limit of the software accelerator" not in result.describe()


def test_a_rank_that_died_in_the_devices_own_code() -> None:
    dead = RankResult(rank=0, exit_status=-11, stderr=NATIVE)
    assert failed(dead).artefact == Artefact(
        What.CRASH, "was killed by SIGSEGV", "it died in an operator or a collective of its own"
    )
    elsewhere = RankResult(
        rank=0, exit_status=-11, stderr=NATIVE.replace("trlcompat::", "x::").replace("torch_npu", "y")
    )
    assert failed(elsewhere).artefact is None
    ended = RankResult(rank=0, exit_status=-15, stderr=NATIVE, ended_by_launcher="the launch timed out")
    assert failed(ended, timed_out=True).artefact is None


def test_a_rank_that_continued_after_it_and_ended_in_another_way() -> None:
    printed = f"loading\n{ARTEFACT.describe()}\ngoing on\n"
    assert failed(rank(0, OTHER, stderr=printed)).artefact == ARTEFACT
    hung = [RankResult(rank=number, ended_by_launcher="the launch timed out", exit_status=-9) for number in range(2)]
    hung.append(dataclasses.replace(hung[0], rank=2, stderr=printed))
    assert failed(*hung, timed_out=True).artefact == ARTEFACT
    assert failed(RankResult(rank=0, returned=True, stderr=printed)).artefact is None


def test_without_a_rank_nothing_is_known() -> None:
    assert LaunchError("no server").artefact is None
    assert failed(RankResult(rank=0, returned=True)).artefact is None
