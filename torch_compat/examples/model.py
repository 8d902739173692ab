"""A small causal language model with the interface of models of transformers."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LanguageModelConfig:
    """Sizes of a `LanguageModel`; the defaults give about a million parameters."""

    vocabulary: int = 256
    length: int = 128  # the longest input, in tokens
    width: int = 192  # width of the residual stream; a multiple of `heads`
    layers: int = 2
    heads: int = 6


class LanguageModel(nn.Module):
    """A transformer that predicts every token from those before it, with tied embeddings."""

    def __init__(self, config: LanguageModelConfig):
        super().__init__()
        self.config, width = config, config.width
        self.embedding = nn.Embedding(config.vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(config.length, width))
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        layer = nn.TransformerEncoderLayer(width, config.heads, 4 * width, **options)
        self.blocks = nn.TransformerEncoder(layer, config.layers, nn.LayerNorm(width), False)
        self.output = nn.Linear(width, config.vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Share the embedding's weight with the output; a move to an XLA device undoes this."""
        self.output.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Return "logits" (batch, tokens, vocabulary), and with labels "loss", in nats per token.

        Both arguments are int64 (batch, tokens); labels are not shifted, as in transformers.
        """
        tokens = input_ids.shape[1]
        x = self.embedding(input_ids) + self.positions[:tokens]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens, device=x.device)
        logits = self.output(self.blocks(x, mask, is_causal=True))
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


@torch.no_grad()
def mean_loss(model: nn.Module, tokens: Tensor, *, batch_size: int = 32) -> float:
    """Return the loss in eval mode, on the host, over all `tokens`, int64 (samples, length)."""
    was_training = model.training
    model.eval()
    total = sum(len(part) * float(model(part, part)["loss"]) for part in tokens.split(batch_size))
    model.train(was_training)
    return total / len(tokens)
