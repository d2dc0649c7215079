"""The corrected trainers: TRL's own trainers, each with the cures of its kind in front, by :func:`cured`.

``GRPOTrainer``, ``SFTTrainer``, ``DPOTrainer``, ``KTOTrainer``, ``RewardTrainer``, ``RLOOTrainer``,
``DistillationTrainer`` and ``PPOTrainer``: each is TRL's trainer of that name of whichever release is installed
(``PPOTrainer`` also where TRL calls it ``PPOv2Trainer``, or keeps it in ``trl.experimental``), takes what that takes,
and behaves like it elsewhere. What is cured: the page of cures; what that comes to on the installed stack:
``GRPOTrainer.cures``. As upstream, ``PPOTrainer`` cannot resume: its ``train`` takes no checkpoint.

A class is made when it is first asked for, so that importing this module imports nothing of the stack. Asking for one
that the installed TRL lacks raises the error of importing it from there; for ``PPOTrainer`` an ``ImportError`` that
says what to install.
"""

from __future__ import annotations

import types
from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = [
    "DPOTrainer",
    "DistillationTrainer",
    "GRPOTrainer",
    "KTOTrainer",
    "PPOTrainer",
    "RLOOTrainer",
    "RewardTrainer",
    "SFTTrainer",
]

if TYPE_CHECKING:  # for type checkers, which know nothing of what `__getattr__` makes
    _Upstream: Any = object

    class DPOTrainer(_Upstream): ...

    class DistillationTrainer(_Upstream): ...

    class GRPOTrainer(_Upstream): ...

    class KTOTrainer(_Upstream): ...

    class PPOTrainer(_Upstream): ...

    class RLOOTrainer(_Upstream): ...

    class RewardTrainer(_Upstream): ...

    class SFTTrainer(_Upstream): ...


_MODULES = {"RLOOTrainer": "trl.trainer.rloo_trainer"}
"""Where a trainer of TRL is imported from, if not from ``trl``, which in some releases has another one."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pytest_trlcompat.trainers.curing.compose import cured
    from pytest_trlcompat.trainers.curing.trl_ppo import ppo_trainer_class

    in_trl = _MODULES.get(name, "trl")
    upstream: Any = ppo_trainer_class() if name == "PPOTrainer" else getattr(import_module(in_trl), name)
    described = {
        "__module__": __name__,
        "__doc__": f"``{upstream.__module__}.{upstream.__name__}`` with known bugs cured; see ``{name}.cures``.",
    }
    # The next time it is found without this function, and so does pickle.
    return globals().setdefault(
        name, types.new_class(name, (cured(upstream),), exec_body=lambda it: it.update(described))
    )
