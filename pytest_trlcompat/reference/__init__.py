"""What a training step must give: an independent computation in plain PyTorch to hold a trainer against.

Written from the papers and from the documentation of each argument, never from a trainer's code, so that a mistake
there is not repeated here. It knows neither TRL nor Transformers nor ranks: completions are given, ranks are simulated,
and a model is anything that returns logits::

    from pytest_trlcompat import reference

    rollout = reference.Rollout(prompts=[[5, 6], [5, 6]], completions=[[7, 1], [8, 9]], rewards=[[1.0], [0.0]])
    step = reference.grpo_step(model, rollout, reference.GRPOSettings(num_generations=2, beta=0.04))
    for name, value in reference.quantities(step):  # in the order in which a step makes them
        ...

:func:`rloo_step` does the same for RLOO, and :func:`ppo_step` for a batch of PPO with policy, value model and reward
model. :func:`first_rloo_step` is for a batch of RLOO as TRL trained it up to 0.21, and :func:`supervised_train` for
trainers whose batches are rows of a dataset, each with its own objective.

If prompts have images, :attr:`Rollout.inputs` holds what a processor makes of each, and models are called with it.

Where the documentation does not decide, a docstring says ``undecided by the documentation``, and :class:`Undecided`,
:class:`RLOOUndecided`, :class:`PPOUndecided` or :class:`FirstRLOOUndecided` takes the choice. It covers text
completions with rewards that are given: no generation, no tools, no corrections for another inference engine. It is
written to be read, not to be fast: the graphs of all micro-batches of a step are kept at once.
"""

from __future__ import annotations

from pytest_trlcompat.reference.distillation import (
    DistillationObjective,
    DistillationSettings,
    DistillationUndecided,
    generalized_divergences,
)
from pytest_trlcompat.reference.experts import load_balancing_loss, router_logits
from pytest_trlcompat.reference.first_rloo import first_rloo_step, first_rloo_train
from pytest_trlcompat.reference.first_rloo_records import (
    FirstRLOOExperience,
    FirstRLOOMicroBatch,
    FirstRLOOOptimizerStep,
    FirstRLOOStep,
)
from pytest_trlcompat.reference.first_rloo_rewards import (
    CompletionAdvantages,
    completion_advantages,
    leave_one_out_baselines,
)
from pytest_trlcompat.reference.first_rloo_settings import FirstRLOOSettings, FirstRLOOUndecided
from pytest_trlcompat.reference.grpo import grpo_evaluate, grpo_step, grpo_train
from pytest_trlcompat.reference.inputs import TOKEN_INPUTS, joined_inputs
from pytest_trlcompat.reference.kto import (
    UNPAIRED_LOSSES,
    KTOObjective,
    KTOSettings,
    KTOUndecided,
    mismatched,
    unpaired_losses,
)
from pytest_trlcompat.reference.metrics import (
    average_logs,
    average_over_tokens,
    clip_ratios,
    completion_metrics,
    generation_metrics,
    mean_over_tokens,
    training_metrics,
)
from pytest_trlcompat.reference.normalisation import token_shares
from pytest_trlcompat.reference.objective import (
    clipped,
    entropy_control,
    high_entropy_mask,
    importance_weights,
    on_policy_mask,
    policy_losses,
    trajectory_weights,
)
from pytest_trlcompat.reference.on_policy_settings import OnPolicySettings, OnPolicyUndecided
from pytest_trlcompat.reference.optimizer import (
    AdamWState,
    adamw_step,
    clip_gradients,
    decayed_parameters,
    gradient_norm,
    learning_rate_factor,
    mix_weights,
    sgd_step,
)
from pytest_trlcompat.reference.orpo import ORPOObjective, ORPOSettings, ORPOUndecided, log_odds_ratios, orpo_row
from pytest_trlcompat.reference.policy import Scores, kl_estimate, score_tokens
from pytest_trlcompat.reference.ppo import ppo_step, ppo_train
from pytest_trlcompat.reference.ppo_losses import clipped_policy_losses, clipped_value_losses
from pytest_trlcompat.reference.ppo_metrics import episode_metrics, update_metrics
from pytest_trlcompat.reference.ppo_models import response_scores, state_values
from pytest_trlcompat.reference.ppo_records import (
    Episodes,
    Experience,
    PPOLayout,
    PPOMicroBatch,
    PPOOptimizerStep,
    PPOStep,
    unshuffled_layout,
)
from pytest_trlcompat.reference.ppo_rewards import (
    advantage_estimates,
    divergence,
    penalised_scores,
    rewards_of,
    step_mask,
    whiten,
)
from pytest_trlcompat.reference.ppo_settings import PPOSettings, PPOUndecided
from pytest_trlcompat.reference.preference_losses import PairScores, divergence_scores, pair_losses, pair_weights
from pytest_trlcompat.reference.preference_settings import PAIR_LOSSES, PreferenceSettings, PreferenceUndecided
from pytest_trlcompat.reference.preference_tokens import common_prompt, preference_row, shared_messages
from pytest_trlcompat.reference.preferences import (
    CompletionScores,
    PreferenceObjective,
    score_completions,
    synchronised,
)
from pytest_trlcompat.reference.records import (
    Evaluation,
    Generation,
    GRPOStep,
    Layout,
    MicroBatch,
    Rollout,
    contiguous_layout,
    quantities,
)
from pytest_trlcompat.reference.reward import (
    RewardSettings,
    RewardUndecided,
    preference_losses,
    reward_objective,
    sequence_rewards,
)
from pytest_trlcompat.reference.rewards import (
    Advantages,
    advantages_of,
    mean_of_present,
    std_of_present,
    total_rewards,
)
from pytest_trlcompat.reference.rloo import (
    RLOOMicroBatch,
    RLOOStep,
    rloo_evaluate,
    rloo_step,
    rloo_train,
    rloo_training_metrics,
)
from pytest_trlcompat.reference.rloo_objective import (
    RLOOAdvantages,
    leave_one_out_advantages,
    sequence_log_ratios,
    sequence_losses,
)
from pytest_trlcompat.reference.settings import (
    GRPOSettings,
    OptimizerSettings,
    RLOOSettings,
    RLOOUndecided,
    SamplingSettings,
    SamplingUndecided,
    Undecided,
)
from pytest_trlcompat.reference.sft import (
    IGNORED,
    SFTSettings,
    SFTUndecided,
    best_fit_bins,
    labels_of,
    sft_objective,
    split_rows,
    truncated,
    wrapped_blocks,
)
from pytest_trlcompat.reference.supervised import (
    Batch,
    Measured,
    Objective,
    SupervisedEvaluation,
    SupervisedSettings,
    SupervisedStep,
    SupervisedUndecided,
    supervised_evaluate,
    supervised_logs,
    supervised_steps,
    supervised_train,
)
from pytest_trlcompat.reference.tokens import Tokens, pad, tokens_of

__all__ = [
    "IGNORED",
    "PAIR_LOSSES",
    "TOKEN_INPUTS",
    "UNPAIRED_LOSSES",
    "AdamWState",
    "Advantages",
    "Batch",
    "CompletionAdvantages",
    "CompletionScores",
    "DistillationObjective",
    "DistillationSettings",
    "DistillationUndecided",
    "Episodes",
    "Evaluation",
    "Experience",
    "FirstRLOOExperience",
    "FirstRLOOMicroBatch",
    "FirstRLOOOptimizerStep",
    "FirstRLOOSettings",
    "FirstRLOOStep",
    "FirstRLOOUndecided",
    "GRPOSettings",
    "GRPOStep",
    "Generation",
    "KTOObjective",
    "KTOSettings",
    "KTOUndecided",
    "Layout",
    "Measured",
    "MicroBatch",
    "ORPOObjective",
    "ORPOSettings",
    "ORPOUndecided",
    "Objective",
    "OnPolicySettings",
    "OnPolicyUndecided",
    "OptimizerSettings",
    "PPOLayout",
    "PPOMicroBatch",
    "PPOOptimizerStep",
    "PPOSettings",
    "PPOStep",
    "PPOUndecided",
    "PairScores",
    "PreferenceObjective",
    "PreferenceSettings",
    "PreferenceUndecided",
    "RLOOAdvantages",
    "RLOOMicroBatch",
    "RLOOSettings",
    "RLOOStep",
    "RLOOUndecided",
    "RewardSettings",
    "RewardUndecided",
    "Rollout",
    "SFTSettings",
    "SFTUndecided",
    "SamplingSettings",
    "SamplingUndecided",
    "Scores",
    "SupervisedEvaluation",
    "SupervisedSettings",
    "SupervisedStep",
    "SupervisedUndecided",
    "Tokens",
    "Undecided",
    "adamw_step",
    "advantage_estimates",
    "advantages_of",
    "average_logs",
    "average_over_tokens",
    "best_fit_bins",
    "clip_gradients",
    "clip_ratios",
    "clipped",
    "clipped_policy_losses",
    "clipped_value_losses",
    "common_prompt",
    "completion_advantages",
    "completion_metrics",
    "contiguous_layout",
    "decayed_parameters",
    "divergence",
    "divergence_scores",
    "entropy_control",
    "episode_metrics",
    "first_rloo_step",
    "first_rloo_train",
    "generalized_divergences",
    "generation_metrics",
    "gradient_norm",
    "grpo_evaluate",
    "grpo_step",
    "grpo_train",
    "high_entropy_mask",
    "importance_weights",
    "joined_inputs",
    "kl_estimate",
    "labels_of",
    "learning_rate_factor",
    "leave_one_out_advantages",
    "leave_one_out_baselines",
    "load_balancing_loss",
    "log_odds_ratios",
    "mean_of_present",
    "mean_over_tokens",
    "mismatched",
    "mix_weights",
    "on_policy_mask",
    "orpo_row",
    "pad",
    "pair_losses",
    "pair_weights",
    "penalised_scores",
    "policy_losses",
    "ppo_step",
    "ppo_train",
    "preference_losses",
    "preference_row",
    "quantities",
    "response_scores",
    "reward_objective",
    "rewards_of",
    "rloo_evaluate",
    "rloo_step",
    "rloo_train",
    "rloo_training_metrics",
    "router_logits",
    "score_completions",
    "score_tokens",
    "sequence_log_ratios",
    "sequence_losses",
    "sequence_rewards",
    "sft_objective",
    "sgd_step",
    "shared_messages",
    "split_rows",
    "state_values",
    "std_of_present",
    "step_mask",
    "supervised_evaluate",
    "supervised_logs",
    "supervised_steps",
    "supervised_train",
    "synchronised",
    "token_shares",
    "tokens_of",
    "total_rewards",
    "training_metrics",
    "trajectory_weights",
    "truncated",
    "unpaired_losses",
    "unshuffled_layout",
    "update_metrics",
    "whiten",
    "wrapped_blocks",
]
