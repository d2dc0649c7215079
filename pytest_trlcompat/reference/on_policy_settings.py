"""What PPO and the first RLOO have in common: arguments of ``OnPolicyConfig``, and what documentation leaves open."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_trlcompat.reference.settings import OptimizerSettings, check_choices

__all__ = ["OnPolicySettings", "OnPolicyUndecided"]

_UNDECIDED: dict[str, tuple[object, ...]] = {
    "clipped_by": ("objective", "range"),
    "eos_counted_in": ("kept", "sampled"),
    "learning_rate_logged": ("used", "next"),
    "metrics_mean": ("tokens", "micro_batches"),
    "objective_entropy": ("exact", "sampled"),
    "ratio_var_over": ("tokens", "micro_batches"),
    "schedule_steps": ("optimizer", "batches"),
}


@dataclass(frozen=True, kw_only=True)
class OnPolicyUndecided:
    """What neither the papers nor the documentation of both trainers decide; each default is the simplest reading.

    Attributes:
        eos_must_end: whether a response that has an end of sequence before its end still gets ``missing_eos_penalty``:
            the guide says "do not end with an EOS token", the argument "fails to generate an EOS token". They differ
            only where no stop token is applied.
        eos_counted_in: the ends of sequence of ``val/num_eos_tokens``: those that are ``"kept"`` in responses, or all
            that were ``"sampled"``, those behind a stop token, too.
        non_score_reward_sign: of ``objective/non_score_reward``: -1 for a reward, as its name says, 1 for
            "basically ``beta * kl.sum(1)``", as its explanation says. ``objective/rlhf_reward`` is the mean of what is
            optimized, with either.
        objective_entropy: ``objective/entropy``, by response: the sum of the estimates ``-log pi`` of the tokens that
            were ``"sampled"``, as the documentation says since https://github.com/huggingface/trl/pull/5289, or of the
            ``"exact"`` entropies of their distributions, as "the mean entropy of the policy" before.
        clipped_by: what is clipped: where clipping changes the ``"objective"``, or where a ratio or a value is out of
            ``"range"``.
        metrics_mean: averages over tokens that are logged: over all ``"tokens"`` of a batch's updates, or the mean over
            its ``"micro_batches"``.
        ratio_var_over: ``val/ratio_var``: the variance of all ratios, each of a token in PPO, or of the mean ratios of
            ``"micro_batches"``, divided by ``n - 1``; NaN where there is one.
        entropy_at_temperature: whether entropies are those of the distribution that responses are sampled from, or of
            that at temperature 1.
        schedule_steps: what the learning rate's schedule counts: ``"optimizer"`` steps, or ``"batches"``.
        learning_rate_logged: that which the batch's last optimizer step ``"used"``, or the ``"next"`` one's.
    """

    eos_must_end: bool = False
    eos_counted_in: str = "kept"
    non_score_reward_sign: int = -1
    objective_entropy: str = "sampled"
    clipped_by: str = "objective"
    metrics_mean: str = "tokens"
    ratio_var_over: str = "tokens"
    entropy_at_temperature: bool = True
    schedule_steps: str = "optimizer"
    learning_rate_logged: str = "used"

    def __post_init__(self) -> None:
        check_choices(self, _UNDECIDED)


@dataclass(frozen=True, kw_only=True)
class OnPolicySettings(OptimizerSettings):
    """The arguments of ``OnPolicyConfig`` and ``TrainingArguments``, and further ones that both trainers have.

    Names and defaults are TRL's and those of Transformers 5:
    https://huggingface.co/docs/transformers/main_classes/trainer.

    Attributes:
        world_size: how many ranks share each batch; they are simulated.
        pad_token_id, eos_token_id: of the tokenizer.
        response_length: "Length of the response", the most tokens that one has.
        stop_token_id: a response ends with its first one; ``None``: "No stop token is applied". ``stop_token="eos"`` is
            that of the tokenizer's end of sequence.
        missing_eos_penalty: what is taken from the score of a response without an end of sequence.
        non_eos_penalty, penalty_reward_value: of releases until 0.10: "the reward value for responses that do not
            contain `stop_token_id`", in place of the score.
        num_mini_batches: "Number of minibatches to split a batch into"; each is one optimizer step, of
            ``gradient_accumulation_steps`` micro-batches on every rank.
        num_total_batches: of the whole training, for the learning rate's schedule; ``None``: the batches that are run.

    Raises:
        ValueError: for a value that the documentation does not name, and for values that contradict each other.
    """

    world_size: int = 1
    pad_token_id: int = 0
    eos_token_id: int = 1
    learning_rate: float = 3e-6

    response_length: int = 53
    stop_token_id: int | None = None
    temperature: float = 0.7
    missing_eos_penalty: float | None = None
    non_eos_penalty: bool = False
    penalty_reward_value: float = -1.0

    num_ppo_epochs: int = 4
    num_mini_batches: int = 1
    num_total_batches: int | None = None

    kl_coef: float = 0.05
    whiten_rewards: bool = False
    cliprange: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature <= 0:
            raise ValueError(f"temperature={self.temperature} is not positive")
        if self.missing_eos_penalty is not None and self.missing_eos_penalty <= 0:
            raise ValueError(f"missing_eos_penalty={self.missing_eos_penalty}, but it must be a positive value")
        if self.non_eos_penalty and self.stop_token_id is None:
            raise ValueError("non_eos_penalty is of responses without stop_token_id, which is not set")
        for name in (
            "world_size",
            "response_length",
            "num_ppo_epochs",
            "num_mini_batches",
            "gradient_accumulation_steps",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not positive")
