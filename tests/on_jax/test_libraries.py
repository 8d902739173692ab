"""Models of transformers and timm, with random weights: losses and gradients are torch's."""

from collections.abc import Callable
from typing import Any

import models
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from libraries import timm, transformers
from torch import nn

TOLERANCE = 2e-6
TOKENS = 11
NO_DROPOUT = {
    "attention_dropout": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "attn_pdrop": 0.0,
    "dropout_rate": 0.0,
    "embd_pdrop": 0.0,
    "hidden_dropout_prob": 0.0,
    "resid_pdrop": 0.0,
}
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, **NO_DROPOUT}
HEADS = {"num_attention_heads": 2}


def gpt2() -> nn.Module:
    options = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8, "vocab_size": TOKENS}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**options, **NO_DROPOUT))


def bert() -> nn.Module:
    config = transformers.BertConfig(**SMALL, **HEADS, vocab_size=TOKENS)
    return transformers.BertForMaskedLM(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(**SMALL, **HEADS, image_size=8, patch_size=4, num_labels=3)
    return transformers.ViTForImageClassification(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(**SMALL, **HEADS, num_key_value_heads=1, vocab_size=TOKENS)
    return transformers.LlamaForCausalLM(config)


def t5() -> nn.Module:
    options = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(
        **options, vocab_size=TOKENS, decoder_start_token_id=0, **NO_DROPOUT
    )
    return transformers.T5ForConditionalGeneration(config)


def timms(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, pretrained=False, num_classes=3, **options)


def text() -> dict[str, np.ndarray]:
    ids = np.random.default_rng(0).integers(1, TOKENS, (2, 6)).astype(np.int32)
    ids[1, :2] = 0  # padding, on the left: of these rows attention is to no key
    labels = np.where(ids > 0, ids, -100).astype(np.int32)
    return {"input_ids": ids, "attention_mask": (ids > 0).astype(np.int32), "labels": labels}


def images(size: int) -> dict[str, np.ndarray]:
    pixels = np.random.default_rng(0).normal(size=(2, 3, size, size)).astype(np.float32)
    return {"pixel_values": pixels, "labels": np.array([0, 2], np.int32)}


MODELS = {
    "GPT-2": (gpt2, text),
    "BERT": (bert, text),
    "ViT": (vit, lambda: images(8)),
    "Llama": (llama, text),
    "T5": (t5, text),
    "timm's ViT": (
        timms("vit_tiny_patch16_224", img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2),
        lambda: images(8),
    ),
    "timm's ConvNeXt": (
        timms("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)),
        lambda: images(32),
    ),
}


def loss(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    batch = {n: x.long() if n in ("input_ids", "labels") else x for n, x in batch.items()}
    if isinstance(module, transformers.PreTrainedModel):
        return module(**batch).loss
    return F.cross_entropy(module(batch["pixel_values"]), batch["labels"])


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_torchs(name):
    make, data = MODELS[name]
    models.assert_as_torch(make().train(), loss, data(), TOLERANCE, at_least=0.0)
