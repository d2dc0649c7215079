"""Losses of pairs of completions, from the log-probabilities that policy and reference model give them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from pytest_trlcompat.reference.preference_settings import OF_MARGINS, PreferenceSettings

__all__ = ["PairScores", "divergence_scores", "pair_losses", "pair_weights"]


@dataclass(frozen=True)
class PairScores:
    """What policy and reference model say about ``B`` pairs of completions, each ``(B,)``.

    Attributes:
        chosen, rejected: log-probabilities of the policy, in nats.
        reference_chosen, reference_rejected: of the reference model; 0 where every completion is equally likely.
        chosen_lengths, rejected_lengths: how many tokens.
    """

    chosen: Tensor
    rejected: Tensor
    reference_chosen: Tensor
    reference_rejected: Tensor
    chosen_lengths: Tensor
    rejected_lengths: Tensor

    @property
    def chosen_ratios(self) -> Tensor:
        """Log-ratios of policy and reference model."""
        return self.chosen - self.reference_chosen

    @property
    def rejected_ratios(self) -> Tensor:
        return self.rejected - self.reference_rejected

    def per_token(self) -> PairScores:
        """Means over tokens in place of sums."""
        chosen, rejected = self.chosen_lengths.clamp(min=1), self.rejected_lengths.clamp(min=1)
        return PairScores(
            self.chosen / chosen,
            self.rejected / rejected,
            self.reference_chosen / chosen,
            self.reference_rejected / rejected,
            self.chosen_lengths,
            self.rejected_lengths,
        )


def divergence_scores(log_ratios: Tensor, settings: PreferenceSettings) -> Tensor:
    """``f'(u)`` of ratios ``u`` of policy and reference model, up to a constant, which no difference shows.

    ``log u`` for the reverse Kullback-Leibler divergence, ``-1/u`` for the forward one, ``log(2u / (1 + u))`` for that
    of Jensen and Shannon, ``(1 - u^-a) / a`` for the alpha-divergence. Source: Wang et al., "Beyond Reverse KL",
    https://arxiv.org/abs/2309.16240, table 1.
    """
    kind, alpha = settings.f_divergence_type, settings.f_alpha_divergence_coef
    if kind == "forward_kl":
        return -torch.exp(-log_ratios)
    if kind == "js_divergence":
        return math.log(2.0) + logsigmoid(log_ratios)
    if kind == "alpha_divergence":
        return (1.0 - torch.exp(-alpha * log_ratios)) / alpha
    return log_ratios


def pair_losses(scores: PairScores, loss_type: str, settings: PreferenceSettings, shift: Tensor) -> Tensor:
    """The loss of each pair, ``(B,)``; with ``z`` the difference of the log-ratios of both completions.

    - ``sigmoid``: ``-log s(beta z)``, DPO, equation 7; with label smoothing ``e`` that of cDPO:
      ``-(1 - e) log s(beta z) - e log s(-beta z)``. ``sigmoid_norm``: the same of log-ratios per token, Tülu 3.
    - ``robust``: ``((1 - e) L(z) - e L(-z)) / (1 - 2 e)`` with ``L`` the loss of DPO; Robust DPO, equation 12.
    - ``hinge``: ``max(0, 1 - beta z)``; RSO, SLiC.
    - ``ipo``: ``(z - 1 / (2 beta))^2``; IPO, equation 17.
    - ``exo_pair``: the divergence of ``(s(beta z), s(-beta z))`` from ``(1 - e, e)``; EXO, equation 16.
    - ``nca_pair``: ``-log s(r_w) - log s(-r_w) / 2 - log s(-r_l) / 2`` with ``r`` beta times a log-ratio; NCA.
    - ``bco_pair``: ``-log s(r_w - d) - log s(-(r_l - d))`` with ``d`` the mean reward, which has no gradient; BCO.
    - ``sppo_hard``: ``(a_w - 1 / (2 beta))^2 + (a_l + 1 / (2 beta))^2`` with ``a`` a log-ratio; SPPO, hard labels.
    - ``aot``: the loss of DPO of the difference of sorted log-ratios: of chosen to rejected of the policy, and of the
      reference model; ``aot_pair``, ``aot_unpaired``: of chosen, and of rejected, policy to reference; AOT.
    - ``apo_zero``: ``1 - s(r_w) + s(r_l)``; ``apo_down``: ``s(r_w) + 1 - s(r_w - r_l)``; APO.
    - ``discopop``: ``-log s(beta z) (1 - m) + exp(-beta z) m`` with ``m = s(beta z / tau)``; DiscoPOP.

    Args:
        loss_type: any but ``sft``, which is no loss of log-probabilities of whole completions.
        shift: ``d`` of ``bco_pair``, a scalar.
    """
    beta, smoothing = settings.beta, settings.smoothing_of(loss_type)
    if loss_type in OF_MARGINS:
        return _of_margins(_margins(scores, loss_type, settings), loss_type, settings)
    chosen, rejected = scores.chosen_ratios, scores.rejected_ratios
    if loss_type == "aot":
        policy = (scores.chosen - scores.rejected).sort().values
        margins = policy - (scores.reference_chosen - scores.reference_rejected).sort().values
        return _smoothed(beta * margins, smoothing)
    if loss_type in ("aot_pair", "aot_unpaired"):
        return _smoothed(beta * (chosen.sort().values - rejected.sort().values), smoothing)
    if loss_type == "sppo_hard":
        return (chosen - 0.5 / beta) ** 2 + (rejected + 0.5 / beta) ** 2
    better, worse = beta * chosen, beta * rejected
    if loss_type == "nca_pair":
        return -logsigmoid(better) - 0.5 * logsigmoid(-better) - 0.5 * logsigmoid(-worse)
    if loss_type == "bco_pair":
        return -logsigmoid(better - shift) - logsigmoid(shift - worse)
    if loss_type == "apo_zero":
        return 1 - torch.sigmoid(better) + torch.sigmoid(worse)
    if loss_type == "apo_down":
        return torch.sigmoid(better) + 1 - torch.sigmoid(better - worse)
    raise ValueError(f"loss_type={loss_type!r} is no loss of log-probabilities of whole completions")


def _margins(scores: PairScores, loss_type: str, settings: PreferenceSettings) -> Tensor:
    """The difference of both completions' scores, ``(B,)``."""
    normalized = loss_type == "sigmoid_norm" or (loss_type == "ipo" and settings.undecided.ipo_averaged)
    if not normalized:
        return divergence_scores(scores.chosen_ratios, settings) - divergence_scores(scores.rejected_ratios, settings)
    if settings.undecided.normalized == "ratios":
        scores = scores.per_token()
        return divergence_scores(scores.chosen_ratios, settings) - divergence_scores(scores.rejected_ratios, settings)
    chosen = divergence_scores(scores.chosen_ratios, settings) / scores.chosen_lengths.clamp(min=1)
    return chosen - divergence_scores(scores.rejected_ratios, settings) / scores.rejected_lengths.clamp(min=1)


def _of_margins(margins: Tensor, loss_type: str, settings: PreferenceSettings) -> Tensor:
    beta, smoothing = settings.beta, settings.smoothing_of(loss_type)
    scaled = beta * margins
    if loss_type == "hinge":
        return torch.relu(1 - scaled)
    if loss_type == "ipo":
        return (margins - 0.5 / beta) ** 2
    if loss_type == "robust":
        return (-(1 - smoothing) * logsigmoid(scaled) + smoothing * logsigmoid(-scaled)) / (1 - 2 * smoothing)
    if loss_type == "exo_pair":
        better = torch.sigmoid(scaled) * (logsigmoid(scaled) - math.log(1 - smoothing))
        return better + torch.sigmoid(-scaled) * (logsigmoid(-scaled) - math.log(smoothing))
    if loss_type == "discopop":
        mixture = torch.sigmoid(scaled / settings.discopop_tau)
        return -logsigmoid(scaled) * (1 - mixture) + torch.exp(-scaled) * mixture
    return _smoothed(scaled, smoothing)


def _smoothed(scaled: Tensor, smoothing: float) -> Tensor:
    return -(1 - smoothing) * logsigmoid(scaled) - smoothing * logsigmoid(-scaled)


def pair_weights(chosen: Tensor, rejected: Tensor, settings: PreferenceSettings) -> Tensor:
    """Weights of ``use_weighting``, ``(B,)``, without a gradient: ``w(x, y_w) w(x, y_l)``.

    ``w(x, y)`` is ``exp`` of the mean over tokens of ``log pi(y_t) - log sum_v pi(v)^2``. Source: Zhou et al., WPO,
    https://arxiv.org/abs/2406.11827, equation 2.

    Args:
        chosen, rejected: ``(B,)``, these means.
    """
    weights = torch.exp(chosen + rejected).detach()
    return weights.clamp(max=1.0) if settings.undecided.weight_at_most_one else weights
