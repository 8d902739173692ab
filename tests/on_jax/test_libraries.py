"""Models of transformers and timm, with random weights: losses and gradients are torch's.

`test_docs.py` has a vision transformer and BERT.
"""

from typing import Any

import models
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from libraries import timm, transformers
from torch import nn

from support.exhaustive import sweep

TOKENS = 11
OF_DROPOUT = (
    "attention_dropout attention_probs_dropout_prob attn_pdrop dropout_rate embd_pdrop "
    "hidden_dropout_prob resid_pdrop"
)
NO_DROPOUT = dict.fromkeys(OF_DROPOUT.split(), 0.0)
LAYERS = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, **NO_DROPOUT}
LAYERS["num_attention_heads"] = 2
OF_TEXT = LAYERS | {"vocab_size": TOKENS}


def text() -> dict[str, np.ndarray]:
    ids = np.random.default_rng(0).integers(1, TOKENS, (2, 6)).astype(np.int32)
    ids[1, :2] = 0  # padding, on the left: of these rows attention is to no key
    labels = np.where(ids > 0, ids, -100).astype(np.int32)
    return {"input_ids": ids, "attention_mask": (ids > 0).astype(np.int32), "labels": labels}


def images(size: int = 32) -> dict[str, np.ndarray]:
    pixels = np.random.default_rng(0).normal(size=(2, 3, size, size)).astype(np.float32)
    return {"pixel_values": pixels, "labels": np.array([0, 2], np.int32)}


# The class of transformers, with {} in the place of "Config", its options, and data; or of timm.
MODELS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "GPT-2": (
        "GPT2{}LMHeadModel",
        {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": TOKENS, **NO_DROPOUT},
        text,
    ),
    "T5": (
        "T5{}ForConditionalGeneration",
        {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, **NO_DROPOUT}
        | {"vocab_size": TOKENS, "decoder_start_token_id": 0},
        text,
    ),
    "DeBERTa": (
        "DebertaV2{}ForMaskedLM",
        {"relative_attention": True, "position_buckets": 4, "pos_att_type": ["p2c", "c2p"]}
        | OF_TEXT,
        text,
    ),
    "Mixtral": (
        "Mixtral{}ForCausalLM",
        OF_TEXT | {"num_key_value_heads": 1, "num_local_experts": 3},
        text,
    ),
    "timm's ConvNeXt": (
        "convnext_atto",
        {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16), "num_classes": 3},
        images,
    ),
    "timm's ResNet-18": ("resnet18", {"num_classes": 3}, lambda: images(64)),
}


def made(name: str) -> nn.Module:
    kind, options, _ = MODELS[name]
    if "{}" not in kind:
        return timm.create_model(kind, pretrained=False, **options)
    before, _, after = kind.partition("{}")
    config = getattr(transformers, f"{before}Config")(**options)
    if name == "Mixtral":
        config._experts_implementation = "batched_mm"  # as on_jax's refusal says
    return getattr(transformers, before + after)(config)


def loss(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    batch = {n: x.long() if n in ("input_ids", "labels") else x for n, x in batch.items()}
    if "return_loss" in batch:
        batch["return_loss"] = True
    if isinstance(module, transformers.PreTrainedModel):
        return module(**batch).loss
    return F.cross_entropy(module(batch["pixel_values"]), batch["labels"])


@pytest.mark.parametrize("name", sweep(MODELS, lambda name: "ResNet" not in name))
def test_losses_gradients_and_statistics_are_torchs(name):
    tolerance = 5e-5 if "ResNet" in name else 1e-5  # of sums over many batch norms
    module, batch = made(name).train(), MODELS[name][2]()
    models.assert_as_torch(module, loss, batch, tolerance, at_least=0.0)
