"""The defaults that conditions ask for are those of the release that is installed."""

from __future__ import annotations

import dataclasses
import enum
import importlib.metadata

from pytest_trlcompat.training import defaults
from pytest_trlcompat.training.aliases import name_in
from pytest_trlcompat.training.training import UNKNOWN


def test_defaults_of_the_installed_release() -> None:
    import trl

    release = importlib.metadata.version("trl")
    wrong, compared = [], 0
    for trainer, cls in (("grpo", trl.GRPOConfig), ("dpo", trl.DPOConfig), ("sft", trl.SFTConfig)):
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for name in sorted(name for who, name in defaults._table()[1] if who == trainer):
            taken, expected = name_in(fields, name), defaults.of(trainer, release)(name)
            if taken is None or expected is UNKNOWN:
                continue
            field = fields[taken]
            factory = field.default_factory
            value = field.default if factory is dataclasses.MISSING else factory()
            compared += 1
            if (value.value if isinstance(value, enum.Enum) else value) != expected:
                wrong.append(f"{cls.__name__}.{taken}: {value!r} where defaults.json has {expected!r}")
    assert wrong == []
    assert compared > 60
