"""Which architectures of Transformers TRL's fused head gives other log-probabilities than the model's own.

    nox -s bench -- fused_heads

Every architecture with a head for causal language models that can be built small from its config alone, with random
weights that are large enough to matter, in float32 on the CPU. Printed is how many there are, and each of which it
differs by more than rounding, or ends with an error; of the first also what the corrected trainers' head gives.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pytest_trlcompat.stack import TELLING  # noqa: E402
from pytest_trlcompat.trainers.logprobs.own_logits import _checking  # noqa: E402

__all__ = ["main"]

TOLERANCE = 1e-3
"""In nats: what rounding does to sums of a few dozen float32."""
LARGEST = 30_000_000
"""Parameters: an architecture that cannot be built smaller is left out."""
SCALE = 0.3
TRLS = "TRL's"
WORDS, WIDTH, LAYERS, HEADS, LENGTH = 64, 32, 2, 4, 64
SMALL = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "n_embed", "lru_width", "moe_intermediate_size"), WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "decoder_ffn_dim"), 2 * WIDTH),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "rotary_dim"), 4),
    **dict.fromkeys(
        ("head_dim", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), LENGTH),
    **{"vocab_size": WORDS, "word_embed_proj_dim": WIDTH // 2, "shared_expert_intermediate_size": WIDTH},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1},
}
"""By the names that configs have."""


def main() -> int:
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    print(", ".join(f"{name} {metadata.version(name)}" for name in TELLING))
    counts: Counter[str] = Counter()
    for name, model in _models():
        said = "not built" if model is None else _said(model)
        counts[said.partition(":")[0]] += 1
        if said.startswith(("differs", "error")):
            print(f"  {name}: {said}", flush=True)
    print(", ".join(f"{count} {what}" for what, count in sorted(counts.items())))
    return 0


def _models() -> Iterator[tuple[str, Any]]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    for name, kind in CONFIG_MAPPING.items():
        try:
            found = MODEL_FOR_CAUSAL_LM_MAPPING[kind]
            yield name, _built(kind, found[0] if isinstance(found, (tuple, list)) else found)
        except KeyError:
            continue


def _built(config_class: Any, model_class: Any) -> Any:
    import torch

    try:
        default = config_class()
        if default.get_text_config() is not default:
            return None
        sizes: dict[str, Any] = {key: value for key, value in SMALL.items() if getattr(default, key, None) is not None}
        if getattr(default, "layer_types", None):
            sizes["layer_types"] = list(default.layer_types)[:LAYERS]
        config = config_class(**sizes)
        with torch.device("meta"):
            outline = model_class._from_config(config, attn_implementation="eager")
        if sum(parameter.numel() for parameter in outline.parameters()) > LARGEST:
            return None
        model = model_class._from_config(config, attn_implementation="eager").float().eval()
        torch.manual_seed(0)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if parameter.dim() > 1 or "bias" in key:
                    parameter.normal_(0.0, SCALE)
            model(**_batch()).logits  # noqa: B018 - whether it can
    except Exception:
        return None
    return model


def _batch() -> dict[str, Any]:
    import torch

    ids = torch.randint(3, WORDS, (2, 9), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _said(model: Any) -> str:
    from trl.trainer.utils import add_fused_lm_head

    batch, own = _batch(), model.forward
    off = {}
    for name, add in ((TRLS, add_fused_lm_head), ("corrected", _checking(add_fused_lm_head))):
        model.forward = own
        try:
            off[name] = _off(model, add, batch)
        except Exception as error:
            return f"error: {type(error).__name__}: {str(error)[:100]}"
    if off[TRLS] < TOLERANCE:
        return "the same"
    return f"differs: by {off[TRLS]:.3g} nats, corrected by {off['corrected']:.3g}"


def _off(model: Any, add: Any, batch: dict[str, Any]) -> float:
    import torch

    with torch.no_grad():
        logps = model(**batch).logits.float().log_softmax(-1)[:, :-1]
        wanted = logps.gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)
        add(model)
        found = model(**batch, labels=batch["input_ids"], fused_lm_head=True).log_probs
    return float((found - wanted).abs().max())


if __name__ == "__main__":
    sys.exit(main())
