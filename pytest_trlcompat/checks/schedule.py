"""Does the learning rate move as planned?"""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from pytest_trlcompat.checks._ranks import OddError, together

__all__ = ["check_schedule", "scheduler_steps"]


def scheduler_steps(scheduler: Any) -> int | None:
    """How many steps a learning rate scheduler of torch has made, or ``None`` if it does not count them.

    ``ReduceLROnPlateau`` steps at evaluations, and DeepSpeed's own schedulers count otherwise.
    """
    scheduler = _inner(scheduler)
    steps = getattr(scheduler, "last_epoch", None)
    return None if isinstance(scheduler, ReduceLROnPlateau) or not isinstance(steps, int) else steps


def check_schedule(optimizer: Any, scheduler: Any, *, made: int, planned: int) -> dict[str, Any]:
    """The scheduler made one step for each of the optimizer's, and the optimizer has the rates of the scheduler.

    Args:
        optimizer: torch's, Accelerate's or DeepSpeed's.
        scheduler: torch's, or Accelerate's, which makes a step for each process if batches are not split.
        made: steps of the scheduler between two points of time: the difference of two :func:`scheduler_steps`.
        planned: steps of the optimizer between them, without those that loss scaling skipped.

    Returns:
        ``made``, ``planned``, and ``rates``, the learning rate of each group.

    Raises:
        OddError: on every rank, with numbers.
    """
    with together("the learning rate"):
        rates = [float(group["lr"]) for group in _inner(optimizer).param_groups]
        report = {"made": made, "planned": planned, "rates": rates}
        problems = []
        if made not in _allowed(scheduler, planned):
            problems.append(
                f"the scheduler made {made} steps in {planned} of the optimizer: the learning rate "
                + ("stays where it was" if made == 0 else f"is where {made} steps would have brought it")
            )
        scheduled = [float(rate) for rate in getattr(_inner(scheduler), "_last_lr", rates)]
        if len(scheduled) == len(rates) and any(
            abs(scheduled_rate - rate) > 1e-6 * abs(scheduled_rate)
            for scheduled_rate, rate in zip(scheduled, rates, strict=True)
        ):
            problems.append(
                f"the optimizer's learning rates are {rates}, the scheduler's {scheduled}: it was made for another "
                "optimizer, or something else sets them"
            )
        if problems:
            raise OddError("expected the learning rate to move as planned, but " + "; ".join(problems), report)
    return report


def _allowed(scheduler: Any, planned: int) -> set[int]:
    if not hasattr(scheduler, "scheduler") or getattr(scheduler, "split_batches", True):
        return {planned}
    from accelerate.state import AcceleratorState

    return {planned, planned * int(AcceleratorState().num_processes)}


def _inner(wrapped: Any) -> Any:
    """What Accelerate's wrappers wrap."""
    for name in ("scheduler", "optimizer"):
        while type(wrapped).__module__.startswith("accelerate.") and hasattr(wrapped, name):
            wrapped = getattr(wrapped, name)
    return wrapped
