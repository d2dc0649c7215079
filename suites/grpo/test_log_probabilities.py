"""How GRPO computes log-probabilities: of which tokens, with which mask, at which temperature, in which dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge, Untestable

from ..in_rank import grpo_logps
from ..launches import distinct
from ..measured import largest
from ..settings.table import row

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trlcompat.tiny import TinyModel

    from ..settings.trainings import SettingTrainings

REFUSED = "got an unexpected keyword argument"
Runs: TypeAlias = "Callable[[], dict[str, dict[str, Any]]]"
"""What :func:`grpo_logps.log_probabilities` measured of each variant."""
TOLERANCE = 1e-5
"""Of a log-probability in float32: two orders above rounding, five below the errors of the bugs."""
TOLERANCE_BF16 = 0.1
"""The same in bfloat16: some units in the last place of a logit of 4; the bugs' errors are above 1."""


@pytest.fixture
def log_probabilities(subject: str, launch_once: Callable[..., list[Any]], sharp_qwen2: TinyModel) -> Runs:
    """One launch for all tests that judge its variants."""

    def measured() -> dict[str, dict[str, Any]]:
        (variants,) = launch_once(grpo_logps.log_probabilities, subject, sharp_qwen2, strategy="single")
        return dict(variants)

    return measured


@pytest.mark.known_issue("grpo-logits-to-keep")
def test_logits_to_keep(subject: str, judge: Judge, log_probabilities: Runs) -> None:
    """The keyword that shortens the logits, and the numbers behind it (trl 2770).

    TRL asks the model for the last K + 1 logits only, by a keyword whose name changed. A release of Transformers that
    does not know the name swallows it: at best all logits are materialised, at worst the wrong positions are scored. A
    model of one's own may refuse the keyword.
    """
    # Padding and temperature are other matters where upstream is wrong; ours must be right in all of them.
    names = ("plain", "split", "bf16", *(("padded", "temperature", "all") if subject == "corrected" else ()))

    def measure() -> Finding:
        variants = {name: log_probabilities()[name] for name in names}
        verdicts = [_verdict_of_kept(name, run) for name, run in variants.items()]
        worst = next((verdict for verdict in verdicts if verdict is not Verdict.OK), Verdict.OK)
        return Finding(worst, {**variants.pop("plain"), "variants": variants})

    judge(measure, subject=subject, strategy="single")


@pytest.mark.known_issue("grpo-logits-to-keep")
def test_a_model_that_refuses_the_keyword(subject: str, judge: Judge, log_probabilities: Runs) -> None:
    """A model that takes no such keyword is scored by all of its logits."""

    def measure() -> Finding:
        run = log_probabilities()["neither"]
        return Finding(_verdict_of_refusal(run), run)

    judge(measure, subject=subject, strategy="single-neither")


@pytest.mark.known_issue("grpo-prompt-mask")
def test_prompt_mask(subject: str, judge: Judge, log_probabilities: Runs) -> None:
    """The padding of prompts is attended to when they are scored (trl 2708).

    trl 0.14.0 scores prompts and completions without an attention mask. Rows whose prompt is padded on the left then
    have log-probabilities that are off by several nats, for the policy and for the reference model.
    """

    def measure() -> Finding:
        run = log_probabilities()["padded"]
        return Finding(_verdict(run), run)

    judge(measure, subject=subject, strategy="single")


@pytest.mark.known_issue("grpo-temperature")
def test_temperature(subject: str, judge: Judge, log_probabilities: Runs) -> None:
    """Tokens are sampled at one temperature and scored at another (trl 3029).

    Completions are sampled from softmax(logits / temperature). trl before 0.16.0 scores them without the division, so
    that ratio, KL and gradient are those of another policy, unless the temperature is 1; its default was 0.9.
    """

    def measure() -> Finding:
        run = log_probabilities()["temperature"]
        return Finding(_verdict(run), run)

    judge(measure, subject=subject, strategy="single")


@pytest.mark.known_issue("grpo-bf16-logprobs")
@pytest.mark.parametrize("label", ["single-bf16_weights", "zero2-bf16"])
def test_bfloat16(label: str, subject: str, judge: Judge, setting_trainings: SettingTrainings) -> None:
    """GRPO takes the log-softmax of logits in bfloat16 in bfloat16.

    Right is: log-probabilities are computed in float32. A number in float32 is one that bfloat16 can hold by chance
    alone, once in 65,536; the result of an operator in bfloat16 always is.
    """

    def measure() -> Finding:
        ranks, _ = setting_trainings.ranks_and_one_process(subject, row(label), neighbours=False)
        if failures := distinct(rank["failure"] for rank in ranks):
            return Finding(Verdict.ERROR, {"failure": failures[0]})
        shares = [rank["rounded"] for rank in ranks]
        if None in shares:
            raise Untestable("this release of TRL computes log-probabilities in a closure, where nothing can look")
        wrong = largest(shares) > 0.5
        return Finding(Verdict.SILENT if wrong else Verdict.OK, {"rounded": shares, "losses": ranks[0]["losses"]})

    judge(measure, subject=subject, strategy=label)


def _verdict_of_kept(name: str, run: dict[str, Any]) -> Verdict:
    if "failure" in run:
        return Verdict.ERROR
    assert run["logits_length"] <= run["sequence"], "the hook on the output head saw more positions than there are"
    assert run["spread"] > 0.5, "log-probabilities that hardly differ would hide a wrong position"
    if not run["max_abs_error"] <= (TOLERANCE_BF16 if name == "bf16" else TOLERANCE):  # also NaN
        return Verdict.SILENT
    if "kl" in run and not abs(run["kl"][0]) <= TOLERANCE:
        return Verdict.SILENT
    return Verdict.WASTEFUL if run["logits_length"] > run["kept"] else Verdict.OK


def _verdict_of_refusal(run: dict[str, Any]) -> Verdict:
    """Such a model cannot shorten its logits: long ones are no waste of the trainer's."""
    return Verdict.BROKEN if REFUSED in run.get("failure", "") else _verdict(run)


def _verdict(run: dict[str, Any]) -> Verdict:
    if "failure" in run:
        return Verdict.ERROR
    return Verdict.OK if run["max_abs_error"] <= TOLERANCE else Verdict.SILENT  # NaN is silent, too
