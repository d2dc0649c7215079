"""``launch`` with the stack, when things go wrong: each fault ends in bounded time, with the right message.

Faults that need no collective are in tests/launch/test_launch.py. After each one the next launch must work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pytest_trlcompat.launch import Launcher, LaunchError

from .launch_bodies import all_reduce, meet

BOUND = 40.0
"""Seconds within which a fault must have ended; all here end at once or after a short timeout."""


@pytest.fixture
def failing(launcher: Launcher) -> Iterator[Callable[..., LaunchError]]:
    """Launch a function that must fail, in bounded time; the next launch is then made and must work."""

    def launch(function: Callable[..., Any], timeout: float = 60, **settings: Any) -> LaunchError:
        started = time.monotonic()
        with pytest.raises(LaunchError) as caught:
            launcher(function, strategy="ddp", sharded=False, timeout=timeout, **settings)
        assert time.monotonic() - started < BOUND
        return caught.value

    yield launch
    assert launcher(all_reduce, strategy="ddp", sharded=False).values == [3.0, 3.0]


def test_an_exception_before_the_process_group(failing: Callable[..., LaunchError]) -> None:
    def raise_early() -> None:
        raise KeyError("before")

    error = failing(raise_early)
    assert "raised KeyError" in str(error)
    assert error.result is not None
    assert [rank.failure is not None for rank in error.result.ranks] == [True, True]


@pytest.mark.fault(
    "One of two ranks raises while the other waits for it in a collective.",
    "The launch ends at once, and names the rank that raised, not the one that waited.",
)
def test_an_exception_within_a_step(failing: Callable[..., LaunchError]) -> None:
    def raise_on_rank_1() -> None:
        import torch

        rank, device = meet()
        if rank == 1:
            raise ArithmeticError("after")
        torch.distributed.all_reduce(torch.ones(1, device=device))

    error = failing(raise_on_rank_1)
    assert "first observed failure: rank 1 raised ArithmeticError" in str(error)


def have_no_notes(why: str) -> None:
    """Ranks cannot share the file in which they announce what they do; without a reason, they can."""
    import errno
    import os

    from torch_npu import _collectives

    upstream, notes = os.open, _collectives._notes

    def watched(*args: Any) -> int | None:
        descriptor = notes(*args)
        assert (descriptor is None) == bool(why)
        return descriptor

    _collectives._notes = watched

    def without_notes(path: Any, *args: Any, **kwargs: Any) -> int:
        if "trlcompat-notes" in str(path):
            raise FileNotFoundError(path)
        return upstream(path, *args, **kwargs)

    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if why == "several machines" and os.environ["RANK"] != "0":
        os.open = without_notes
    if why == "full disk":
        os.posix_fallocate = full


@pytest.mark.fault(
    "Two ranks call different collectives.",
    "Both raise at once, and each names what either of them called.",
)
@pytest.mark.parametrize("why", ["", "several machines", "full disk"])
def test_mismatched_collectives_name_each_other(failing: Callable[..., LaunchError], why: str) -> None:
    def call_different_ones(why: str) -> None:
        import torch

        have_no_notes(why)
        rank, device = meet()
        value = torch.ones(4, device=device)
        torch.distributed.all_reduce(value) if rank else torch.distributed.broadcast(value, 0)

    error = failing(call_different_ones, why=why)
    assert error.result is not None
    assert not error.result.timed_out
    for rank in error.result.ranks:
        assert rank.failure is not None
        assert "Detected mismatch between collectives on ranks" in rank.failure.message
        assert f"Rank {rank.rank} is running OpType={['BROADCAST', 'ALLREDUCE'][rank.rank]}" in rank.failure.message
        assert f"rank {1 - rank.rank} is running OpType={['ALLREDUCE', 'BROADCAST'][rank.rank]}" in rank.failure.message


@pytest.mark.fault(
    "Two ranks call the same collective with tensors of different shapes.",
    "Both raise at once, and each names both shapes.",
)
@pytest.mark.parametrize("why", ["", "several machines"])
def test_mismatched_shapes_name_each_other(failing: Callable[..., LaunchError], why: str) -> None:
    def send_different_shapes(why: str) -> None:
        import torch

        have_no_notes(why)
        rank, device = meet()
        torch.distributed.all_reduce(torch.ones(4 + rank, device=device))

    error = failing(send_different_shapes, why=why)
    assert error.result is not None
    assert not error.result.timed_out
    for rank in error.result.ranks:
        assert rank.failure is not None
        assert "TensorShape=[4]" in rank.failure.message
        assert "TensorShape=[5]" in rank.failure.message


def test_a_waiting_rank_learns_that_another_disagrees(launcher: Launcher) -> None:
    def disagree_and_live_on() -> str:
        import torch
        from torch.distributed.distributed_c10d import _get_default_store

        rank, device = meet()
        store = _get_default_store()
        value = torch.ones(4, device=device)
        message = ""
        try:
            if rank == 0:
                store.set("waits", "")
                torch.distributed.broadcast(value, 1)
            else:
                store.get("waits")
                time.sleep(0.2)
                torch.distributed.all_reduce(value)
        except torch.distributed.DistBackendError as error:
            message = str(error)
        store.set(f"done {rank}", "")
        store.get(f"done {1 - rank}")  # the others would notice a rank that ends by its connections
        return message

    ranks = launcher(disagree_and_live_on, strategy="ddp", sharded=False).values
    assert ["Detected mismatch between collectives on ranks" in message for message in ranks] == [True, True]


def test_notes_are_left_and_compared_beyond_their_number(launcher: Launcher) -> None:
    def go_on_and_disagree() -> tuple[float, str]:
        import torch

        rank, device = meet()
        value = torch.zeros(1, device=device)
        for number in range(2500):
            torch.distributed.all_reduce(value.fill_(number))
        try:
            torch.distributed.all_reduce(torch.ones(1 + rank, device=device))
        except torch.distributed.DistBackendError as error:
            return value.item(), str(error)
        raise AssertionError("ranks disagreed and nobody said so")

    for value, message in launcher(go_on_and_disagree, strategy="ddp", sharded=False).values:
        assert value == 2 * 2499
        assert "of its group, TensorShape=[1]" in message
        assert "of its group, TensorShape=[2]" in message


@pytest.mark.fault(
    "A rank returns while another waits for it in a collective.",
    "The launch ends at once, and says which of them did not take part.",
)
def test_a_rank_that_is_done_while_another_waits_for_it(failing: Callable[..., LaunchError]) -> None:
    def leave_the_other_waiting() -> int:
        import torch

        rank, device = meet()
        if rank == 0:
            torch.distributed.all_reduce(torch.ones(1, device=device))
        return rank

    error = failing(leave_the_other_waiting)
    assert "first observed failure: rank 0 raised" in str(error)
    assert "rank 1 returned after" in str(error)
    assert "it did not take part in the collective in which rank 0 waited" in str(error)


@pytest.mark.fault(
    "A rank is killed by SIGKILL while another waits for it in a collective.",
    "The launch ends at once, and names the rank that was killed.",
)
def test_a_rank_that_is_killed_while_others_wait(failing: Callable[..., LaunchError]) -> None:
    def die_of_memory() -> None:
        import os
        import signal

        import torch

        rank, device = meet()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.all_reduce(torch.ones(1, device=device))

    assert "rank 1 was killed by SIGKILL (often: out of memory)" in str(failing(die_of_memory))


@pytest.mark.fault(
    "A rank reads address zero.",
    "The launch names the signal, and shows the Python and the native stack.",
)
def test_a_segmentation_fault_shows_python_and_native_stacks(failing: Callable[..., LaunchError]) -> None:
    def read_address_zero() -> None:
        import ctypes

        import torch  # whose handler prints the native stack

        assert torch.ones(1).item() == 1
        ctypes.string_at(0)

    error = failing(read_address_zero)
    assert "was killed by SIGSEGV" in str(error)
    assert error.result is not None
    stderr = error.result.ranks[0].stderr
    assert "in read_address_zero" in stderr
    assert "string_at" in stderr
    assert "frame #" in stderr


@pytest.mark.fault(
    "A rank waits in a collective that another never enters.",
    "The launch ends at its timeout, and shows where each of them was.",
)
def test_a_hang_shows_where_each_rank_was(failing: Callable[..., LaunchError]) -> None:
    def only_rank_0_waits() -> None:
        import time

        import torch

        rank, device = meet()
        if rank == 0:
            torch.distributed.all_reduce(torch.ones(1, device=device))
        time.sleep(600)

    error = failing(only_rank_0_waits, timeout=3)
    assert error.result is not None
    assert error.result.timed_out
    assert "rank 0 was ended by the launcher" in str(error)
    assert "it was in all_reduce (distributed/distributed_c10d.py:" in str(error)
    assert "called from only_rank_0_waits (stack/test_launch_faults.py:" in str(error)
    assert "it was in only_rank_0_waits (stack/test_launch_faults.py:" in str(error)


@pytest.mark.fault(
    "A rank never reaches the rendezvous.",
    "The launch ends at its timeout, and shows in which function that rank was.",
)
def test_a_rank_that_never_joins(failing: Callable[..., LaunchError]) -> None:
    def sleep_before_the_process_group() -> None:
        import os
        import time

        if os.environ["RANK"] == "1":
            time.sleep(600)
        meet()

    error = failing(sleep_before_the_process_group, timeout=3)
    assert "the launch's timeout of 3 s passed" in str(error)
    assert "it was in sleep_before_the_process_group" in str(error)


@pytest.mark.fault(
    "A rank loops in native code while another waits for it in a collective.",
    "The launch ends at its timeout, and shows where each of them was.",
)
def test_an_endless_native_loop_while_another_waits(failing: Callable[..., LaunchError]) -> None:
    def spin_in_native_code() -> None:
        import torch

        rank, device = meet()
        if rank == 1:
            any(iter(int, 1))
        torch.distributed.all_reduce(torch.ones(1, device=device))

    error = failing(spin_in_native_code, timeout=3)
    assert "it was in spin_in_native_code" in str(error)
    assert "it was in all_reduce" in str(error)


@pytest.mark.fault(
    "A rank leaves by `os._exit(0)` while another waits for it in a collective.",
    "The launch fails: the rank had exited before its function returned.",
)
def test_exit_in_a_step(failing: Callable[..., LaunchError]) -> None:
    def exit_with_status_zero() -> None:
        import os

        import torch

        rank, device = meet()
        if rank == 1:
            os._exit(0)
        torch.distributed.all_reduce(torch.ones(1, device=device))

    assert "rank 1 exited with status 0 before its function returned" in str(failing(exit_with_status_zero))


def test_memory_is_reported_in_bytes(launcher: Launcher) -> None:
    def allocate(count: int) -> None:
        import torch

        kept = torch.ones(count, device="npu")
        assert kept.sum().item() == count
        on_host = bytearray(3 << 26)
        on_host[:: 1 << 12] = b"x" * len(on_host[:: 1 << 12])

    small, large = (launcher(allocate, count, strategy="single").ranks[0] for count in (1 << 10, 1 << 22))
    assert 4 << 10 <= small.peak_accelerator_bytes < 1 << 20
    assert 16 << 20 <= large.peak_accelerator_bytes < 17 << 20
    assert large.peak_bytes > 3 << 26
