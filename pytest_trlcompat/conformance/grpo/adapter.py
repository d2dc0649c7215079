"""The adapter of trainers that train on sampled completions: GRPO's, from which RLOO's derives.

Runs inside a rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from packaging.version import Version

from pytest_trlcompat import stack
from pytest_trlcompat.conformance import comparison, conventions, images, weights
from pytest_trlcompat.conformance.adapter import TrainerAdapter, trainer_class
from pytest_trlcompat.conformance.grpo import configs, expected, objects, quantities, recording
from pytest_trlcompat.conformance.grpo.methods import GRPO, Method

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat.conformance.grpo.records import Recording
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["ADAPTER", "SamplingAdapter"]


class SamplingAdapter(TrainerAdapter):
    """
    Attributes:
        method: the names that TRL and the reference have for the trainer.
    """

    mismatch_stage: ClassVar[str] = "sampling"
    method: ClassVar[Method]

    def absence(self) -> str:
        if Version(stack.installed()["trl"]) >= Version(self.method.since):
            return ""
        return f"{self.method.trainer_class} samples and trains in this way from {self.method.since} on"

    def unknown(self, setting: Mapping[str, Any]) -> list[str]:
        import trl

        return sorted(set(setting) - set(configs.known_part(trl, setting, self.method)))

    def lacking(self, setting: Mapping[str, Any]) -> str:
        return configs.lacking(setting)

    def record(self, subject: str, model: TinyModel, setting: Mapping[str, Any], seed: int) -> tuple[Recording, None]:
        chosen = trainer_class(subject, self.method.trainer_class)
        whole = weights.whole_trained if weights.is_sharded() else None
        return recording.record(chosen, model, setting, seed, whole, self.method), None

    def compare(
        self, recordings: Sequence[Recording], untrained: Any, model: TinyModel, setting: Mapping[str, Any], seed: int
    ) -> comparison.Comparison:
        import transformers

        known = conventions.of_installed(self.trainer)
        policy, reference_model = objects.untrained(model, setting)
        rewards = objects.rewards_of_reference(model, setting)
        # Only prompts are asked of it, so that the length of completions, 1, does not matter.
        data = objects.data_of(model, setting, seed, 1)
        processing_class = objects.tokenizer(model, setting) if data.images is not None else model.tokenizer
        inputs: dict[tuple[int, ...], Mapping[str, torch.Tensor]] = {}
        for part in ("training", "evaluation"):
            inputs |= objects.inputs_asked(model, data, setting, part)
        never = (
            (processing_class.tokenizer.convert_tokens_to_ids(images.IMAGE_TOKEN),) if data.images is not None else ()
        )

        def computed(
            policy: torch.nn.Module, reference_model: torch.nn.Module, padded: bool = False
        ) -> expected.ExpectedTraining:
            return expected.computed(
                *(
                    recordings,
                    policy,
                    processing_class,
                    rewards,
                    known,
                    data.ends,
                    reference_model,
                    padded,
                    self.method,
                ),
                *(inputs, never),
            )

        def neighbours() -> list[expected.ExpectedTraining]:
            # Tokens with the same prefix have the same entropy, so that rounding decides which of them
            # top_entropy_quantile takes. Changed weights leave them equal; the other order of sums of padded rows does
            # not, so it is part of what is measured.
            changed = comparison.neighbours(policy, reference_model)
            return [computed(policy, reference_model, padded=True) for policy, reference_model in changed]

        major = int(transformers.__version__.partition(".")[0])
        unrecorded = known.unrecorded_with(recordings[0].arguments)
        unchanged = computed(policy, reference_model)
        near = neighbours() if quantities.exceeds_floor(recordings, unchanged, major, unrecorded) else []
        return quantities.compare(recordings, unchanged, near, major, unrecorded)


class GRPOAdapter(SamplingAdapter):
    trainer: ClassVar[str] = "grpo"
    method: ClassVar[Method] = GRPO


ADAPTER = GRPOAdapter()
