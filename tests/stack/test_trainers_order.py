"""The order of mixins in the corrected trainers, against the real classes, and why it matters."""

from __future__ import annotations

import ast

import pytest

from pytest_trlcompat import stack, trainers
from pytest_trlcompat.trainers.curing.cure import Cure, check_order
from pytest_trlcompat.trainers.curing.declared_points import all_points
from pytest_trlcompat.trainers.curing.kinds import KINDS
from pytest_trlcompat.trainers.curing.names import MODULES, PLACES
from pytest_trlcompat.trainers.curing.patching import PatchPoint

HAS_PPO = stack.satisfied({"trl": "<1.13"}, stack.installed())


def declared(trainer: type) -> dict[str, dict[str, str]]:
    return {cls.__name__: vars(cls)["_stands_before"] for cls in trainer.__mro__ if vars(cls).get("_stands_before")}


def test_mixins_of_grpo_stand_as_they_declare() -> None:
    names = [cls.__name__ for cls in trainers.GRPOTrainer.__mro__]
    found = declared(trainers.GRPOTrainer)
    named = {"AdapterReferenceMixin", "FSDP2OutputsMixin", "LigerNormalizerMixin", "PlainLogProbsMixin"}
    assert set(found) >= named
    for mixin, others in found.items():
        for other in others:
            assert names.index(mixin) < names.index(other), (mixin, other)
    check_order(trainers.GRPOTrainer)


@pytest.mark.skipif(not HAS_PPO, reason="trl has no PPO trainer from 1.13 on")
def test_mixins_of_ppo_stand_as_they_declare() -> None:
    assert declared(trainers.PPOTrainer) == {}
    check_order(trainers.PPOTrainer)


@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_a_trainer_has_the_mixins_that_declare_its_kind_in_the_order_of_their_places(kind: str) -> None:
    if kind == "ppo" and not HAS_PPO:
        pytest.skip("trl has no PPO trainer from 1.13 on")
    trainer = getattr(trainers, f"{kind.upper()}Trainer")
    mixins = [base for base in trainer.__mro__ if base.__name__ in MODULES and base.__name__.endswith("Mixin")]
    behind = [vars(mixin)["_kinds"][kind][0] for mixin in mixins]
    assert behind == ["", *(mixin.__name__ for mixin in mixins[:-1])]
    assert [mixin.__name__ for mixin in mixins] == list(KINDS[kind])
    of_kind = {name for name, text in PLACES.items() if kind in ast.literal_eval(text)}
    assert {mixin.__name__ for mixin in mixins} == of_kind


def test_what_is_read_of_the_texts_is_what_the_classes_declare() -> None:
    """Of mixins and what they derive from; the texts are read where there is no stack."""
    points: dict[str, list[PatchPoint]] = {}
    for name, point in all_points():
        points.setdefault(name, []).append(point)
    mixins = [getattr(trainers, name) for name in MODULES if name.endswith("Mixin")]
    for cls in {base for mixin in mixins for base in mixin.__mro__ if issubclass(base, Cure)}:
        assert points.pop(cls.__name__, []) == list(vars(cls).get("_points", ()))
        assert ast.literal_eval(PLACES.get(cls.__name__, "{}")) == vars(cls).get("_kinds", {})
    assert points == {}


def test_every_declared_pair_is_refused_the_other_way_round() -> None:
    for mixin, others in declared(trainers.GRPOTrainer).items():
        for other in others:
            with pytest.raises(TypeError, match=f"Wrong: {mixin} must stand before {other} among the bases"):
                type("Wrong", (getattr(trainers, other), getattr(trainers, mixin)), {})


def test_a_trainer_of_ones_own_may_stand_behind_the_corrected_one() -> None:
    import trl

    class Theirs(trl.GRPOTrainer):
        pass

    class My(trainers.GRPOTrainer, Theirs):
        pass

    names = [cls.__name__ for cls in My.__mro__]
    assert names.index("WarningsIssuedMixin") < names.index("Theirs") < len(names) - 1
    assert names[:2] == ["My", "GRPOTrainer"]


def test_in_front_of_plain_log_probs_every_trl_seems_to_have_their_method() -> None:
    """The reason of its declaration: the mixin defines the method by which a TRL without any is known."""
    assert "_get_per_token_logps_and_entropies" in vars(trainers.PlainLogProbsMixin)
