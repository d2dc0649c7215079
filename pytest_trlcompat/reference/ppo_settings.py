"""The arguments that a PPO step depends on, by their documented names, and what documentation leaves open."""

from __future__ import annotations

from dataclasses import dataclass, field

from pytest_trlcompat.reference.on_policy_settings import OnPolicySettings, OnPolicyUndecided
from pytest_trlcompat.reference.settings import check_choices

__all__ = ["PPOSettings", "PPOUndecided"]

_UNDECIDED: dict[str, tuple[object, ...]] = {
    "loss_mean": ("tokens", "micro_batches"),
    "score_at": ("last_token", "after_last_token"),
    "whiten_over": ("batch", "rank"),
}


@dataclass(frozen=True, kw_only=True)
class PPOUndecided(OnPolicyUndecided):
    """What is left open for PPO alone.

    Attributes:
        score_at: where the score, which is "only given at the end of episode" (Huang et al.), is a reward: at the
            ``"last_token"``, as in their example, with nothing after it; or at a step of its own
            ``"after_last_token"``, whose state is the whole response, and which has a value, too. A response as long as
            the longest one of its batch on its rank has no place for such a step, and has its score at its last token.
        whiten_over: the values that are whitened together: those of the whole ``"batch"``, or of each ``"rank"``.
            Huang et al. whiten by mini-batch, where each has rewards and advantages of its own; with one mini-batch
            this is the same, and with several it is no choice here, since the documentation of TRL knows one reward and
            one advantage of each token.
        whiten_correction: the variance of ``n`` values divides by ``n - whiten_correction``. It is 0 in Huang et al.,
            who show that 1 is the default of PyTorch and gives other numbers.
        loss_mean: PPO's expectation over the time steps of a mini-batch: over all its ``"tokens"``, or the mean over
            its ``"micro_batches"`` on every rank of their own means, as data parallelism and gradient accumulation do.
        value_loss_scale: what the squared error of the value function is multiplied by. The paper has 1, the code that
            Huang et al. refer to 1/2.
    """

    score_at: str = "last_token"
    whiten_over: str = "batch"
    whiten_correction: int = 0
    loss_mean: str = "tokens"
    value_loss_scale: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, _UNDECIDED)


@dataclass(frozen=True, kw_only=True)
class PPOSettings(OnPolicySettings):
    """The arguments of ``PPOConfig`` and ``TrainingArguments`` that decide what a step gives.

    Names and defaults are those of TRL 1.12.0, the last with PPO: https://huggingface.co/docs/trl/v1.12.0/ppo_trainer.

    Attributes:
        undecided: what the documentation leaves open.

    Raises:
        ValueError: for a value that the documentation does not name, and for values that contradict each other.
    """

    kl_estimator: str = "k1"
    gamma: float = 1.0
    lam: float = 0.95
    cliprange_value: float = 0.2
    vf_coef: float = 0.1

    undecided: PPOUndecided = field(default_factory=PPOUndecided)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, {"kl_estimator": ("k1", "k3")})

    @property
    def has_own_score_step(self) -> bool:
        """Whether a score may have a step of its own, after the last token."""
        return self.undecided.score_at == "after_last_token"
