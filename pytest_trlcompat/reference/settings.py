"""The arguments that steps of GRPO and RLOO depend on, by their documented names, and what is left open."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = [
    "GRPOSettings",
    "OptimizerSettings",
    "RLOOSettings",
    "RLOOUndecided",
    "SamplingSettings",
    "SamplingUndecided",
    "Undecided",
    "check_choices",
]

_CHOICES: dict[str, tuple[object, ...]] = {
    "importance_sampling_level": ("token", "sequence"),
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "scale_rewards": ("group", "batch", "none", True, False),
}
_SAMPLING_CHOICES: dict[str, tuple[object, ...]] = {"reward_std_over": ("as_scaled", "batch", "groups")}
_OPTIMIZER_CHOICES: dict[str, tuple[object, ...]] = {
    "lr_scheduler_type": ("constant", "constant_with_warmup", "linear", "cosine"),
    "optim": ("adamw_torch", "sgd"),
}
_SAMPLING_UNDECIDED: dict[str, tuple[object, ...]] = {
    "clip_extremes_of": ("completions", "micro_batches"),
    "learning_rate_logged": ("used", "next"),
    "metrics_mean": ("tokens", "micro_batches", "ranks"),
    "no_reward": ("zero", "left_out"),
}
_RLOO_UNDECIDED: dict[str, tuple[object, ...]] = {
    "kl_logged_over": ("completions", "tokens"),
    "rewards_logged": ("totals", "clipped", "final", "unweighted"),
    "rewards_clipped": ("totals", "functions", "with_kl"),
}
_UNDECIDED: dict[str, tuple[object, ...]] = {
    "active_tokens_of": ("step", "generation", "own_generation"),
    "entropy_control_by": ("step", "previous_step"),
    "entropy_coef_logged": ("used", "next"),
    "entropy_bonus_mean": ("step", "micro_batches"),
    "entropy_threshold_over": ("ranks", "rank"),
    "kl_logged_over": ("tokens", "completions"),
    "reference_scored_at": ("generation", "step"),
    "vespo_mean": ("sequences", "tokens"),
}


@dataclass(frozen=True, kw_only=True)
class SamplingUndecided:
    """What the papers and the documentation of GRPO and of RLOO leave open; each default is the simplest reading.

    Attributes:
        std_correction: a standard deviation of ``n`` rewards divides by ``n - std_correction``. The papers write
            ``std`` without saying which. That of fewer than two rewards is taken for 0.
        std_epsilon: added to a standard deviation before dividing by it. The GRPO paper has none, with which a group of
            equal rewards were 0/0; the GDPO paper names one without its value.
        masked_completions_count: whether a completion that ``mask_truncated_completions`` excludes still counts among
            the completions over which RLOO, and GRPO's ``grpo``, ``sapo``, ``dr_grpo``, ``luspo`` and ``vespo`` take
            their mean.
        entropy_at_temperature: whether entropies are those of the distribution that completions are sampled from, or
            of that at temperature 1.
        no_reward: a completion for which every function gave ``None`` has a total of ``"zero"``, or is
            ``"left_out"`` of means and standard deviations and has no advantage.
        clipped_by_sign: whether a token counts as clipped only where clipping changes the objective, that is below the
            lower bound for a negative advantage, and above the upper one for a positive advantage. The documentation
            defines the lower and upper ratios by the bounds alone, the region by where "the objective is clipped".
        metrics_mean: averages over tokens that are logged: over all ``"tokens"`` of a step; or the mean over its
            ``"micro_batches"`` of their averages over all ranks; or the mean of these of single ``"ranks"``. Unless it
            is ``"tokens"``, the smallest and the largest clip ratios are means of those of each micro-batch, too.
        masked_completions_in_clip_ratios: whether completions that ``mask_truncated_completions`` excludes count in
            clip ratios of whole completions.
        clip_extremes_of: the smallest and the largest clip ratio of any of the ``"completions"``, or of any rank's
            ``"micro_batches"``.
        learning_rate_logged: that which the step ``"used"``, or the ``"next"`` one's.
        num_tokens_each_iteration: whether tokens count again each time that ``num_iterations`` trains on them.
        lone_completion_has_zero_std: whether a group of one completion, as ``num_generations_eval=1`` makes it, counts
            in ``frac_reward_zero_std``.
        lone_reward_std_logged: whether ``rewards/{name}/std`` of one reward is logged, as 0, or left out, also of the
            mean over several generations.
        no_terminated_length: the terminated lengths where no completion terminates.
    """

    std_correction: int = 1
    std_epsilon: float = 1e-4
    masked_completions_count: bool = True
    entropy_at_temperature: bool = True
    no_reward: str = "zero"
    clipped_by_sign: bool = True
    metrics_mean: str = "tokens"
    masked_completions_in_clip_ratios: bool = False
    clip_extremes_of: str = "completions"
    learning_rate_logged: str = "used"
    num_tokens_each_iteration: bool = False
    lone_completion_has_zero_std: bool = False
    lone_reward_std_logged: bool = True
    no_terminated_length: float = 0.0

    def __post_init__(self) -> None:
        check_choices(self, _SAMPLING_UNDECIDED)


@dataclass(frozen=True, kw_only=True)
class Undecided(SamplingUndecided):
    """What they leave open for GRPO alone.

    Attributes:
        active_tokens_of: the "global accumulated batch" whose active tokens ``dapo`` and ``cispo`` divide by: what one
            optimizer ``"step"`` accumulates, or the whole ``"generation"``, by its mean over micro-batches: the sum of
            these, or for each micro-batch that of its ``"own_generation"``. They differ where ``steps_per_generation``
            is not ``gradient_accumulation_steps``.
        entropy_threshold_over: the batch whose quantile ``top_entropy_quantile`` is: a micro-batch over all
            ``"ranks"``, or of one ``"rank"``. The paper says "batch", and knows neither ranks nor micro-batches.
        entropy_bonus_mean: the mean entropy of the bonus: over all tokens of a ``"step"``, or the mean over its
            ``"micro_batches"`` on every rank.
        entropy_control_by: the "current" entropy of ``use_adaptive_entropy``: that of this ``"step"``, or of the
            ``"previous_step"``, with which the first step has no bonus.
        entropy_coef_logged: the coefficient that the step ``"used"``, or the ``"next"`` one's.
        reference_scored_at: whether the reference model scores the tokens of a ``"generation"`` once, or anew at each
            optimizer ``"step"``. They differ where ``sync_ref_model`` changes it between.
        vespo_mean: the paper's expectation over trajectories: a mean over ``"sequences"``, or over the active
            ``"tokens"`` of the accumulated batch, as for ``cispo``.
        kl_logged_over: the KL that is logged is a mean over ``"tokens"``, or over ``"completions"`` of the mean over
            the tokens of each.
        kl_logged_with_weights: whether the KL that is logged has the weights of ``use_bias_correction_kl``, where that
            is set.
    """

    active_tokens_of: str = "step"
    entropy_threshold_over: str = "ranks"
    entropy_bonus_mean: str = "step"
    entropy_control_by: str = "step"
    entropy_coef_logged: str = "used"
    reference_scored_at: str = "generation"
    vespo_mean: str = "sequences"
    kl_logged_over: str = "tokens"
    kl_logged_with_weights: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, _UNDECIDED)


@dataclass(frozen=True, kw_only=True)
class RLOOUndecided(SamplingUndecided):
    """What they leave open for RLOO alone.

    Attributes:
        rewards_clipped: what ``reward_clip_range`` clips: the weighted ``"totals"`` before the KL penalty, the rewards
            of single ``"functions"``, or the final rewards ``"with_kl"``.
        kl_logged_over: "the average KL divergence [...] calculated over generated completions": the mean over
            ``"completions"`` of the sum over the tokens of each, which the documentation calls the estimate for a
            sequence, or the mean over all ``"tokens"``.
        rewards_logged: ``reward`` and ``reward_std``, "after applying reward weights", are those of the ``"totals"``,
            of totals that are ``"clipped"``, or of the ``"final"`` rewards, with the KL penalty: "the reward consists
            of two components"; ``"unweighted"``, as is documented from 0.27 to 0.29: "after summing rewards across
            functions (unweighted)".
    """

    rewards_clipped: str = "totals"
    kl_logged_over: str = "completions"
    rewards_logged: str = "totals"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, _RLOO_UNDECIDED)


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """What the settings of every trainer have: the arguments of the optimizer.

    Names and defaults are those of ``TrainingArguments`` in Transformers 5:
    https://huggingface.co/docs/transformers/main_classes/trainer.

    Attributes:
        warmup_steps: a number of steps of the schedule, or below 1 a part of them.
        max_grad_norm: 0 or ``None`` for no clipping.
    """

    gradient_accumulation_steps: int = 1
    optim: str = "adamw_torch"
    learning_rate: float = 5e-5
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float | None = 1.0
    lr_scheduler_type: str = "linear"
    warmup_steps: float = 0

    def __post_init__(self) -> None:
        check_choices(self, _OPTIMIZER_CHOICES)


@dataclass(frozen=True, kw_only=True)
class SamplingSettings(OptimizerSettings):
    """What GRPO and RLOO have in common: the arguments of ``GRPOConfig`` and ``RLOOConfig`` of the same names.

    Attributes:
        world_size: how many ranks share each batch; they are simulated.
        pad_token_id, eos_token_id: of the tokenizer; of several ends of sequence each ends a completion.
        max_prompt_length: of releases until 0.27.
        router_aux_loss_coef: weight of the auxiliary loss of a mixture of experts. Give the model's own where the
            argument is not set: "the value declared by the model config is used".
        max_steps: of the whole training, for the learning rate's schedule; ``None``: the steps that are run.
        reward_std_over: the logged ``reward_std``: over the full ``"batch"``, as is documented from 1.0 on, or the mean
            of the standard deviations of the ``"groups"``, as is documented until 0.16 for GRPO and until 0.26 for
            RLOO; ``"as_scaled"``, for GRPO from 0.22 to 0.26: of the groups, unless ``scale_rewards="batch"``.

    Raises:
        ValueError: for a value that the documentation does not name, and for values that contradict each other.
    """

    world_size: int = 1
    pad_token_id: int = 0
    eos_token_id: int | tuple[int, ...] = 1
    pad_to_multiple_of: int | None = None

    num_generations: int = 8
    num_generations_eval: int | None = None
    max_prompt_length: int | None = None
    max_completion_length: int = 512
    steps_per_generation: int | None = None
    temperature: float = 1.0

    beta: float = 0.0
    num_iterations: int = 1
    epsilon: float = 0.2
    epsilon_high: float | None = None
    mask_truncated_completions: bool = False
    router_aux_loss_coef: float = 0.0

    reward_weights: tuple[float, ...] | None = None
    reward_std_over: str = "batch"

    sync_ref_model: bool = False
    ref_model_mixup_alpha: float = 0.6
    ref_model_sync_steps: int = 512

    max_steps: int | None = None
    learning_rate: float = 1e-6

    undecided: SamplingUndecided = field(default_factory=SamplingUndecided)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, _SAMPLING_CHOICES)
        if self.num_generations < 2:
            raise ValueError(f"num_generations={self.num_generations}, but a group has at least 2 completions")
        if self.temperature <= 0:
            raise ValueError(f"temperature={self.temperature} is not positive")
        for name in ("world_size", "num_iterations", "gradient_accumulation_steps", "micro_batches_per_generation"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not positive")

    @property
    def micro_batches_per_generation(self) -> int:
        """``steps_per_generation``, which is ``gradient_accumulation_steps`` where it is not set."""
        if self.steps_per_generation is None:
            return self.gradient_accumulation_steps
        return self.steps_per_generation

    @property
    def upper_epsilon(self) -> float:
        """``epsilon_high``, which is ``epsilon`` where it is not set."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def logs_std_of_groups(self) -> bool:
        """Whether ``reward_std`` is the mean of the groups' standard deviations."""
        return self.reward_std_over != "batch"


@dataclass(frozen=True, kw_only=True)
class GRPOSettings(SamplingSettings):
    """The arguments of ``GRPOConfig`` and ``TrainingArguments`` that decide what a step gives.

    Names and defaults are those of TRL 1.16.0 and Transformers 5, whose documentation says what they mean:
    https://huggingface.co/docs/trl/grpo_trainer, https://huggingface.co/docs/trl/paper_index and
    https://huggingface.co/docs/transformers/main_classes/trainer. Other releases have other defaults: ``beta`` is 0.04
    until 0.18, ``temperature`` 0.9 until 0.17, ``loss_type`` ``"bnpo"`` from 0.17 to 0.21, ``use_bias_correction_kl``
    off and ``max_completion_length`` 256 until 1.9.

    Attributes:
        undecided: what the documentation leaves open.

    Raises:
        ValueError: for a value that the documentation does not name, and for values that contradict each other.
    """

    use_bias_correction_kl: bool = True
    delta: float | None = None
    sapo_temperature_neg: float = 1.05
    sapo_temperature_pos: float = 1.0
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    importance_sampling_level: str = "token"
    off_policy_mask_threshold: float | None = None
    top_entropy_quantile: float = 1.0
    loss_type: str = "dapo"

    multi_objective_aggregation: str = "sum_then_normalize"
    scale_rewards: str | bool = "group"

    entropy_coef: float = 0.0
    use_adaptive_entropy: bool = False
    entropy_coef_min: float = 0.0
    entropy_coef_max: float = 1.0
    entropy_coef_delta: float = 0.005
    entropy_target: float = 0.2

    undecided: Undecided = field(default_factory=Undecided)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, _CHOICES)
        if self.loss_type == "luspo" and self.importance_sampling_level != "sequence":
            raise ValueError("loss_type='luspo' requires importance_sampling_level='sequence'")
        if not 0.0 <= self.top_entropy_quantile <= 1.0:
            raise ValueError(f"top_entropy_quantile={self.top_entropy_quantile} is not between 0 and 1")

    @property
    def has_entropy_bonus(self) -> bool:
        """Whether the loss has an entropy term, and ``policy_loss`` and ``entropy_coef`` are logged."""
        return self.use_adaptive_entropy or self.entropy_coef != 0.0

    @property
    def logs_std_of_groups(self) -> bool:
        """Whether ``reward_std`` is the mean of the groups' standard deviations."""
        of_batch = self.reward_std_over == "as_scaled" and self.scale_rewards == "batch"
        return super().logs_std_of_groups and not of_batch


@dataclass(frozen=True, kw_only=True)
class RLOOSettings(SamplingSettings):
    """The arguments of ``RLOOConfig`` and ``TrainingArguments`` that decide what a step gives, from TRL 0.22 on.

    Names and defaults are those of TRL 1.16.0: https://huggingface.co/docs/trl/rloo_trainer. ``max_completion_length``
    is 256 until 1.9.

    Attributes:
        normalize_advantages: "Normalization is done per generation batch to have mean `0.0` and standard deviation of
            `1.0`".
        reward_clip_range: smallest and largest reward.
        undecided: what the documentation leaves open.

    Raises:
        ValueError: for a value that the documentation does not name, and for values that contradict each other.
    """

    num_generations: int = 2
    beta: float = 0.05
    normalize_advantages: bool = False
    reward_clip_range: tuple[float, float] | None = None

    undecided: RLOOUndecided = field(default_factory=RLOOUndecided)


def check_choices(settings: object, choices: dict[str, tuple[object, ...]]) -> None:
    """Raise :class:`ValueError` for an attribute whose value is none of its ``choices``."""
    for name, allowed in choices.items():
        value = getattr(settings, name)
        if value not in allowed:
            raise ValueError(f"{name}={value!r}; choose one of {', '.join(map(repr, allowed))}")
