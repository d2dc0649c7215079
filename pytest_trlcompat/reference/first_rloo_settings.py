"""The arguments that a step of the first RLOO depends on, by their documented names, and what is left open."""

from __future__ import annotations

from dataclasses import dataclass, field

from pytest_trlcompat.reference.on_policy_settings import OnPolicySettings, OnPolicyUndecided
from pytest_trlcompat.reference.settings import check_choices

__all__ = ["FirstRLOOSettings", "FirstRLOOUndecided"]

_UNDECIDED: dict[str, tuple[object, ...]] = {
    "approximate_kl_of": ("completions", "tokens"),
    "normalised": ("rewards", "scores"),
    "normalised_over": ("batch", "rank"),
    "ratio_of": ("completions", "tokens"),
}


@dataclass(frozen=True, kw_only=True)
class FirstRLOOUndecided(OnPolicyUndecided):
    """What is left open for the first RLOO alone.

    Attributes:
        normalised: what ``normalize_reward`` and ``reward_clip_range`` change: the whole ``"rewards"``, which have the
            penalty for the divergence in them, or the ``"scores"``, before that is taken off.
        normalised_over: the numbers whose mean and standard deviation ``normalize_reward``, ``normalize_advantage`` and
            ``whiten_rewards`` take: those of the whole ``"batch"``, or of each ``"rank"``.
        std_correction: a standard deviation of ``n`` numbers divides by ``n - std_correction``.
        std_epsilon: added to a standard deviation before dividing by it.
        ratio_of: ``val/ratio`` and ``val/ratio_var``, of "the current policy probability to the old policy
            probability": that of whole ``"completions"``, which are the actions, or of their ``"tokens"``.
        approximate_kl_of: ``policy/approxkl_avg``: likewise.
    """

    normalised: str = "rewards"
    normalised_over: str = "batch"
    std_correction: int = 0
    std_epsilon: float = 0.0
    ratio_of: str = "completions"
    approximate_kl_of: str = "completions"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, _UNDECIDED)


@dataclass(frozen=True, kw_only=True)
class FirstRLOOSettings(OnPolicySettings):
    """The arguments of ``RLOOConfig`` until TRL 0.21 and ``TrainingArguments`` that decide what a step gives.

    Names and defaults are those of TRL 0.21.0: https://huggingface.co/docs/trl/v0.21.0/rloo_trainer.

    Attributes:
        rloo_k: "number of online samples per prompt".
        normalize_reward: "scaling rewards to have a mean of 0 and a standard deviation of 1".
        reward_clip_range: "limiting reward values within a specific range", from its negative to itself; no argument
            says whether to. ``None`` for releases that have no such argument.
        normalize_advantage: "scaling advantages to have a mean of 0 and a standard deviation of 1".
        token_level_kl: "Whether to use token-level KL penalty or sequence-level KL penalty". Since RLOO "models the
            entire completion as a single action", its reward is the sum of those of its tokens, which is the same with
            either: equation 1 of the report that the documentation refers to gives each token its own penalty, and the
            last one the score.
        undecided: what the documentation leaves open.

    Raises:
        ValueError: for a value that the documentation does not name, and for values that contradict each other.
    """

    rloo_k: int = 2
    normalize_reward: bool = False
    reward_clip_range: float | None = 10.0
    normalize_advantage: bool = False
    token_level_kl: bool = False

    undecided: FirstRLOOUndecided = field(default_factory=FirstRLOOUndecided)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rloo_k < 2:
            raise ValueError(f"rloo_k={self.rloo_k}, but the baseline of a completion is the mean of the others")
