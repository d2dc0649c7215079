"""The arguments that a step on pairs of completions depends on, and what their documentation leaves open."""

from __future__ import annotations

from dataclasses import dataclass, field

from pytest_trlcompat.reference.settings import check_choices
from pytest_trlcompat.reference.supervised import SupervisedSettings, SupervisedUndecided

__all__ = ["PAIR_LOSSES", "PreferenceSettings", "PreferenceUndecided"]

PAIR_LOSSES = (
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard"),
    *("aot", "aot_pair", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
)
"""Values of ``loss_type``. ``aot_pair`` is the name of ``aot_unpaired`` until 0.26."""
OF_MARGINS = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop")
"""Losses of the difference of both completions' rewards, which another divergence changes."""
_CHOICES: dict[str, tuple[object, ...]] = {
    "f_divergence_type": ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"),
}
_UNDECIDED: dict[str, tuple[object, ...]] = {
    "counted_logits": ("vocabulary", "tokens", "left_out"),
    "logits_mean": ("completions", "tokens"),
    "nll_mean": ("completions", "tokens"),
    "normalized": ("ratios", "scores"),
    "reward_shift": ("batch", "none", "running"),
    "text_end": ("always", "missing"),
}


@dataclass(frozen=True, kw_only=True)
class PreferenceUndecided(SupervisedUndecided):
    """What neither the papers nor the documentation of the arguments decide; each default is the simplest reading.

    See :class:`~pytest_trlcompat.reference.SupervisedUndecided` for what other trainers have, too.

    Attributes:
        ipo_averaged: whether IPO's log-likelihoods are means over the tokens of a completion, as is documented until
            0.28 ("the loss is averaged over log-likelihoods of the completion"), or sums, as in the paper.
        ipo_averages_logged: whether the log-probabilities and rewards that are logged are means then, too.
        length_desensitized_reference: whether ``ld_alpha`` holds for the reference model's log-probabilities, too; the
            formula that is documented is one of the policy.
        nll_mean: the negative log-likelihood of ``sft`` and ``rpo_alpha``: a mean over ``"completions"`` of the means
            over their tokens, as in the paper on iterative RPO, or a mean over all ``"tokens"`` of a micro-batch.
        nll_weighted: whether ``use_weighting`` weighs that likelihood, too.
        normalized: with another divergence, the lengths of completions divide log-``"ratios"``, or the ``"scores"``
            that the divergence makes of them.
        reward_shift: the paper on BCO subtracts the mean reward: that of one ``"batch"`` on all ranks, or the
            ``"running"`` mean of all until now; or ``"none"`` is subtracted: TRL's documentation names a "binary
            classifier whose logit serves as a reward", and no shift.
        text_end: an end of sequence is added to a completion that is a text ``"always"``, as the documentation of
            ``tokenize_row`` says from 0.12 to 0.28 ("In any case, the completion sequences will have an eos token
            appended"), or where it is ``"missing"``.
        text_start: whether a prompt that is a text has the special tokens that its tokenizer adds; from 0.12 to 0.28
            ``add_special_tokens`` is documented as "typically used for encoder-decoder models".
        smoothed_aot: whether ``label_smoothing`` holds for ``aot`` and ``aot_pair``.
        weight_at_most_one: whether the product of both completions' weights of ``use_weighting`` is at most 1.
        counted_logits: the logits that are logged are averages over the whole ``"vocabulary"``, or those of the
            ``"tokens"`` that follow; or they are ``"left_out"``: until 0.28 they have no documentation.
        logits_mean: those are means over all ``"tokens"`` of a micro-batch, or over ``"completions"``.
    """

    ipo_averaged: bool = False
    ipo_averages_logged: bool = False
    length_desensitized_reference: bool = False
    nll_mean: str = "completions"
    nll_weighted: bool = False
    normalized: str = "ratios"
    reward_shift: str = "batch"
    smoothed_aot: bool = False
    text_end: str = "missing"
    text_start: bool = True
    weight_at_most_one: bool = False
    counted_logits: str = "vocabulary"
    logits_mean: str = "completions"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, _UNDECIDED)


@dataclass(frozen=True, kw_only=True)
class PreferenceSettings(SupervisedSettings):
    """The arguments of ``DPOConfig`` that decide what a step gives.

    Names are those of TRL 0.9.6 to 1.16.0, defaults those of 1.16.0, whose documentation says what they mean:
    https://huggingface.co/docs/trl/dpo_trainer and https://huggingface.co/docs/trl/paper_index. Other releases have
    other defaults: ``f_alpha_divergence_coef`` is 1 until 0.28.

    Attributes:
        loss_type: one or several of :data:`PAIR_LOSSES`; their sum with ``loss_weights``, 1 each by default.
        smoothed: whether ``label_smoothing`` holds for ``sigmoid``, too, as is documented until 0.28 ("The cDPO is a
            tweak on the DPO loss"), and is 0.001 for ``exo_pair`` where it is not given.
        reference_free, rpo_alpha: of releases until 0.28.
        router_aux_loss_coef: weight of the auxiliary loss of a mixture of experts. Give the model's own where the
            argument is not set.
        undecided: what the documentation leaves open.

    Raises:
        ValueError: for a value that the documentation does not name, or refuses, and for as many weights as losses.
    """

    loss_type: tuple[str, ...] = ("sigmoid",)
    loss_weights: tuple[float, ...] | None = None
    beta: float = 0.1
    label_smoothing: float = 0.0
    smoothed: bool = False
    f_divergence_type: str = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5
    reference_free: bool = False
    use_weighting: bool = False
    rpo_alpha: float | None = None
    ld_alpha: float | None = None
    discopop_tau: float = 0.05
    sync_ref_model: bool = False
    ref_model_mixup_alpha: float = 0.6
    ref_model_sync_steps: int = 512
    router_aux_loss_coef: float = 0.0
    undecided: PreferenceUndecided = field(default_factory=PreferenceUndecided)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, _CHOICES)
        for name in self.loss_type:
            if name not in PAIR_LOSSES:
                raise ValueError(f"loss_type={name!r} is not documented; choose from {list(PAIR_LOSSES)}")
        if self.loss_weights is not None and len(self.loss_weights) != len(self.loss_type):
            raise ValueError(f"{len(self.loss_type)} loss types have {len(self.loss_weights)} weights")
        if "robust" in self.loss_type and not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing={self.label_smoothing} is not in [0, 0.5), as the robust loss needs it")
        if "exo_pair" in self.loss_type and not self.smoothing_of("exo_pair"):
            raise ValueError("label_smoothing must be greater than 0 for exo_pair")
        if self.ld_alpha is not None and not 0 <= self.ld_alpha <= 1:
            raise ValueError(f"ld_alpha={self.ld_alpha} is not in [0, 1]")

    @property
    def weighted_losses(self) -> tuple[tuple[str, float], ...]:
        """Each loss type with its weight."""
        weights = self.loss_weights or (1.0,) * len(self.loss_type)
        return tuple(zip(self.loss_type, weights, strict=True))

    def smoothing_of(self, loss_type: str) -> float:
        """The probability that a label is wrong, for one of the losses; 0 for one that knows none."""
        if loss_type == "exo_pair" and self.smoothed:
            return self.label_smoothing or 1e-3
        takes = {"robust", "exo_pair"} | ({"sigmoid"} if self.smoothed else set())
        takes |= {"aot", "aot_pair", "aot_unpaired"} if self.undecided.smoothed_aot else set()
        return self.label_smoothing if loss_type in takes else 0.0
