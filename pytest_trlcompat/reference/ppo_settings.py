"""The arguments that a PPO step depends on, by their documented names, and what documentation leaves open."""

from __future__ import annotations

from dataclasses import dataclass, field

from pytest_trlcompat.reference.settings import OptimizerSettings, check_choices

__all__ = ["PPOSettings", "PPOUndecided"]

_UNDECIDED: dict[str, tuple[object, ...]] = {
    "clipped_by": ("objective", "range"),
    "eos_counted_in": ("kept", "sampled"),
    "learning_rate_logged": ("used", "next"),
    "loss_mean": ("tokens", "micro_batches"),
    "metrics_mean": ("tokens", "micro_batches"),
    "objective_entropy": ("exact", "sampled"),
    "ratio_var_over": ("tokens", "micro_batches"),
    "schedule_steps": ("optimizer", "batches"),
    "score_at": ("last_token", "after_last_token"),
    "whiten_over": ("batch", "rank"),
}


@dataclass(frozen=True, kw_only=True)
class PPOUndecided:
    """What neither the papers nor the documentation of the arguments decide; each default is the simplest reading.

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
        ratio_var_over: ``val/ratio_var``: the variance of the ratios of all ``"tokens"``, or of the mean ratios of
            ``"micro_batches"``, divided by ``n - 1``; NaN where there is one.
        entropy_at_temperature: whether entropies are those of the distribution that responses are sampled from, or of
            that at temperature 1.
        schedule_steps: what the learning rate's schedule counts: ``"optimizer"`` steps, or ``"batches"``.
        learning_rate_logged: that which the batch's last optimizer step ``"used"``, or the ``"next"`` one's.
    """

    score_at: str = "last_token"
    whiten_over: str = "batch"
    whiten_correction: int = 0
    loss_mean: str = "tokens"
    value_loss_scale: float = 0.5
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
class PPOSettings(OptimizerSettings):
    """The arguments of ``PPOConfig`` and ``TrainingArguments`` that decide what a step gives.

    Names and defaults are those of TRL 1.12.0, the last with PPO, and Transformers 5:
    https://huggingface.co/docs/trl/v1.12.0/ppo_trainer and
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
        undecided: what the documentation leaves open.

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
    kl_estimator: str = "k1"
    whiten_rewards: bool = False
    gamma: float = 1.0
    lam: float = 0.95
    cliprange: float = 0.2
    cliprange_value: float = 0.2
    vf_coef: float = 0.1

    undecided: PPOUndecided = field(default_factory=PPOUndecided)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, {"kl_estimator": ("k1", "k3")})
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

    @property
    def has_own_score_step(self) -> bool:
        """Whether a score may have a step of its own, after the last token."""
        return self.undecided.score_at == "after_last_token"
