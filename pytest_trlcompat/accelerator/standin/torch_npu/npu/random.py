"""Random numbers of the devices: each has a generator, which draws what the CPU's draws from the same seed."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_npu import _C
from torch_npu._missing import lacking
from torch_npu.npu._index import Device, index_of

__all__ = [
    "get_rng_state",
    "get_rng_state_all",
    "initial_seed",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
]

default_generators = tuple(_C.default_generator(index) for index in range(_C.device_count()))


def _shown() -> tuple[torch.Generator, ...]:
    # A rank may have been left fewer devices than there were when this module was imported.
    return default_generators[: _C.device_count()]


def manual_seed(seed: int) -> None:
    default_generators[_C.current_device()].manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    for generator in _shown():
        generator.manual_seed(int(seed))


def seed() -> None:
    default_generators[_C.current_device()].seed()


def seed_all() -> None:
    manual_seed_all(default_generators[0].seed())


def initial_seed() -> int:
    return default_generators[_C.current_device()].initial_seed()


def get_rng_state(device: Device = "npu") -> torch.Tensor:
    return default_generators[index_of(device)].get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    return [generator.get_state() for generator in _shown()]


def set_rng_state(new_state: torch.Tensor, device: Device = "npu") -> None:
    # A generator takes its state from the host's memory alone.
    default_generators[index_of(device)].set_state(new_state.cpu())


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


__getattr__ = lacking("torch.npu.random")
