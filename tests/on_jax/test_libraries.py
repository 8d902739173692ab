"""Models of transformers and timm, with random weights: losses, gradients and steps are torch's."""

import copy
from collections.abc import Callable
from typing import Any

import jax
import models
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from libraries import timm, transformers
from torch import nn

from torch_compat import on_jax

TOLERANCE = 2e-6
# Sums over many batch norms, and logits that are scaled.
ROUGH = {"timm's ResNet-18": 5e-5, "CLIP": 2e-5}
RATE = 0.01
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


def clip() -> nn.Module:
    config = transformers.CLIPConfig(
        text_config={**SMALL, **HEADS, "vocab_size": TOKENS, "eos_token_id": TOKENS - 1},
        vision_config={**SMALL, **HEADS, "image_size": 8, "patch_size": 4},
        projection_dim=8,
    )
    return transformers.CLIPModel(config)


def siglip() -> nn.Module:
    config = transformers.SiglipConfig(
        text_config={**SMALL, **HEADS, "vocab_size": TOKENS, "max_position_embeddings": 8},
        vision_config={**SMALL, **HEADS, "image_size": 8, "patch_size": 4},
    )
    return transformers.SiglipModel(config)


def wav2vec2() -> nn.Module:
    config = transformers.Wav2Vec2Config(
        **SMALL,
        **HEADS,
        conv_dim=(8, 8),
        conv_kernel=(4, 3),
        conv_stride=(3, 2),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        activation_dropout=0.0,
        hidden_dropout=0.0,
        feat_proj_dropout=0.0,
        final_dropout=0.0,
        layerdrop=0.0,
        apply_spec_augment=False,
        num_labels=3,
        classifier_proj_size=8,
    )
    return transformers.Wav2Vec2ForSequenceClassification(config)


def swin() -> nn.Module:
    options = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "window_size": 2}
    config = transformers.SwinConfig(
        **options, depths=[2, 2], num_heads=[1, 2], num_labels=3, drop_path_rate=0.0, **NO_DROPOUT
    )
    return transformers.SwinForImageClassification(config)


def deberta() -> nn.Module:
    config = transformers.DebertaV2Config(
        **SMALL,
        **HEADS,
        vocab_size=TOKENS,
        relative_attention=True,
        position_buckets=4,
        pos_att_type=["p2c", "c2p"],
        max_position_embeddings=8,
    )
    return transformers.DebertaV2ForMaskedLM(config)


def segformer() -> nn.Module:
    config = transformers.SegformerConfig(
        depths=[1, 1, 1, 1],
        sr_ratios=[2, 2, 1, 1],
        hidden_sizes=[8, 8, 16, 16],
        num_attention_heads=[1, 1, 2, 2],
        mlp_ratios=[2, 2, 2, 2],
        decoder_hidden_size=8,
        classifier_dropout_prob=0.0,
        drop_path_rate=0.0,
        num_labels=3,
        **NO_DROPOUT,
    )
    return transformers.SegformerForSemanticSegmentation(config)


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        **SMALL, **HEADS, num_key_value_heads=1, num_local_experts=3, vocab_size=TOKENS
    )
    config._experts_implementation = "batched_mm"  # as on_jax's refusal says
    return transformers.MixtralForCausalLM(config)


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


def pairs() -> dict[str, np.ndarray]:
    ids = np.random.default_rng(1).integers(1, TOKENS - 1, (2, 6)).astype(np.int32)
    ids[:, -1] = TOKENS - 1  # the end
    pixels = images(8)["pixel_values"]
    return {"input_ids": ids, "pixel_values": pixels, "return_loss": np.array(True)}


def sounds() -> dict[str, np.ndarray]:
    waves = np.random.default_rng(0).normal(size=(2, 64)).astype(np.float32)
    return {"input_values": waves, "labels": np.array([0, 2], np.int32)}


def maps() -> dict[str, np.ndarray]:
    labels = np.random.default_rng(1).integers(0, 3, (2, 32, 32)).astype(np.int32)
    return {"pixel_values": images(32)["pixel_values"], "labels": labels}


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
    "timm's ResNet-18": (timms("resnet18"), lambda: images(64)),
    "CLIP": (clip, pairs),
    "SigLIP": (siglip, pairs),
    "Wav2Vec2": (wav2vec2, sounds),
    "Swin": (swin, lambda: images(16)),
    "DeBERTa": (deberta, text),
    "Segformer": (segformer, maps),
    "Mixtral": (mixtral, text),
}


def loss(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    batch = {n: x.long() if n in ("input_ids", "labels") else x for n, x in batch.items()}
    if "return_loss" in batch:
        batch["return_loss"] = True
    if isinstance(module, transformers.PreTrainedModel):
        return module(**batch).loss
    return F.cross_entropy(module(batch["pixel_values"]), batch["labels"])


@pytest.mark.parametrize("name", MODELS)
def test_losses_gradients_and_three_steps_are_torchs(name):
    make, data = MODELS[name]
    module = make().train()
    start, batch = copy.deepcopy(module.state_dict()), data()
    models.assert_as_torch(module, loss, batch, ROUGH.get(name, TOLERANCE), at_least=0.0)
    module.load_state_dict(start)
    loss_fn, params, state = on_jax.as_loss(module, loss)
    compute = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    for _ in range(3):
        (found, (_, state)), gradients = compute(params, batch, model_state=state)
        params = {n: p - RATE * gradients[n] for n, p in params.items()}
        optimizer.zero_grad()
        wanted = loss(module, models.in_torch(batch))
        wanted.backward()
        optimizer.step()
        assert abs(float(found) - wanted.item()) <= 2e-5 * abs(wanted.item())
    held = models.held(module)
    models.assert_close({**params, **state}, {n: held[n] for n in (*params, *state)}, 2e-5)
