"""Models of transformers and timm, with random weights: losses, gradients and steps are torch's.

`test_docs.py` has a vision transformer and BERT.
"""

from typing import Any

import jax
import models
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from libraries import timm, transformers
from torch import nn

from support.exhaustive import sweep
from torch_compat import on_jax

RATE = 0.01
TOKENS = 11
OF_DROPOUT = (
    "attention_dropout attention_probs_dropout_prob attn_pdrop dropout_rate embd_pdrop "
    "hidden_dropout_prob resid_pdrop"
)
NO_DROPOUT = dict.fromkeys(OF_DROPOUT.split(), 0.0)
LAYERS = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, **NO_DROPOUT}
LAYERS["num_attention_heads"] = 2
OF_TEXT = LAYERS | {"vocab_size": TOKENS}
OF_IMAGES = LAYERS | {"image_size": 8, "patch_size": 4}
# Sums over many batch norms, and logits that are scaled.
ROUGH = {"timm's ResNet-18": 5e-5, "CLIP": 2e-5}


def text() -> dict[str, np.ndarray]:
    ids = np.random.default_rng(0).integers(1, TOKENS, (2, 6)).astype(np.int32)
    ids[1, :2] = 0  # padding, on the left: of these rows attention is to no key
    labels = np.where(ids > 0, ids, -100).astype(np.int32)
    return {"input_ids": ids, "attention_mask": (ids > 0).astype(np.int32), "labels": labels}


def images(size: int = 32) -> dict[str, np.ndarray]:
    pixels = np.random.default_rng(0).normal(size=(2, 3, size, size)).astype(np.float32)
    return {"pixel_values": pixels, "labels": np.array([0, 2], np.int32)}


def pairs() -> dict[str, np.ndarray]:
    ids = np.random.default_rng(1).integers(1, TOKENS - 1, (2, 6)).astype(np.int32)
    ids[:, -1] = TOKENS - 1  # the end
    return {"input_ids": ids, "return_loss": np.array(True)} | {
        "pixel_values": images(8)["pixel_values"]
    }


def sounds() -> dict[str, np.ndarray]:
    waves = np.random.default_rng(0).normal(size=(2, 64)).astype(np.float32)
    return {"input_values": waves, "labels": np.array([0, 2], np.int32)}


def maps() -> dict[str, np.ndarray]:
    labels = np.random.default_rng(1).integers(0, 3, (2, 32, 32)).astype(np.int32)
    return images() | {"labels": labels}


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
    "CLIP": (
        "CLIP{}Model",
        {"text_config": OF_TEXT | {"eos_token_id": TOKENS - 1}, "vision_config": OF_IMAGES},
        pairs,
    ),
    "SigLIP": (
        "Siglip{}Model",
        {"text_config": OF_TEXT | {"max_position_embeddings": 8}, "vision_config": OF_IMAGES},
        pairs,
    ),
    "Wav2Vec2": (
        "Wav2Vec2{}ForSequenceClassification",
        {"conv_dim": (8, 8), "conv_kernel": (4, 3), "conv_stride": (3, 2), "num_labels": 3}
        | {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
        | {"activation_dropout": 0.0, "feat_proj_dropout": 0.0, "final_dropout": 0.0}
        | {"hidden_dropout": 0.0, "layerdrop": 0.0, "apply_spec_augment": False}
        | {"classifier_proj_size": 8, **LAYERS},
        sounds,
    ),
    "Swin": (
        "Swin{}ForImageClassification",
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "window_size": 2, "num_labels": 3}
        | {"depths": [2, 2], "num_heads": [1, 2], "drop_path_rate": 0.0, **NO_DROPOUT},
        lambda: images(16),
    ),
    "Segformer": (
        "Segformer{}ForSemanticSegmentation",
        {"depths": [1] * 4, "sr_ratios": [2, 2, 1, 1], "num_attention_heads": [1, 1, 2, 2]}
        | {"hidden_sizes": [8, 8, 16, 16], "mlp_ratios": [2] * 4, "decoder_hidden_size": 8}
        | {"classifier_dropout_prob": 0.0, "drop_path_rate": 0.0, "num_labels": 3, **NO_DROPOUT},
        maps,
    ),
    "timm's ConvNeXt": (
        "convnext_atto",
        {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16), "num_classes": 3},
        images,
    ),
    "timm's ResNet-18": ("resnet18", {"num_classes": 3}, lambda: images(64)),
}
# What these lack the others, the sweep of operations and the ResNet of `TPUManager` have.
USUAL = ("GPT-2", "T5", "DeBERTa", "Mixtral", "Wav2Vec2", "Swin", "timm's ConvNeXt")


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


@pytest.mark.parametrize("name", sweep(MODELS, USUAL.__contains__))
def test_losses_gradients_and_three_steps_are_torchs(name):
    module, batch = made(name).train(), MODELS[name][2]()
    loss_fn, params, state = on_jax.as_loss(module, loss)
    compute = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    for number in range(3):
        (found, (_, state)), gradients = compute(params, batch, model_state=state)
        params = {n: p - RATE * gradients[n] for n, p in params.items()}
        optimizer.zero_grad()
        wanted = loss(module, models.in_torch(batch))
        wanted.backward()
        optimizer.step()
        assert abs(float(found) - wanted.item()) <= 2e-5 * abs(wanted.item())
        if number == 0:
            all_ = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
            atol = ROUGH.get(name, 2e-6) * max(float(g.abs().max()) for g in all_.values())
            for n, gradient in gradients.items():
                of_torch = all_[n].numpy() if n in all_ else np.zeros(gradient.shape)
                np.testing.assert_allclose(gradient, of_torch, rtol=0, atol=atol, err_msg=n)
    held = models.held(module)
    models.assert_close({**params, **state}, {n: held[n] for n in (*params, *state)}, 2e-5)
