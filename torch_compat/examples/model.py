"""A small causal language model with the interface of those of transformers."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ..slowmo import SlowMoDistributedDataParallel


@dataclass(frozen=True)
class LanguageModelConfig:
    """Sizes of a `LanguageModel`; the default has about a million parameters.

    Attributes:
      vocabulary: number of different tokens.
      length: the longest input, in tokens.
      width: of the residual stream; a multiple of `heads`.
      layers: number of blocks.
      heads: attention heads per block.

    Raises:
      ValueError: for sizes that don't fit together.
    """

    vocabulary: int = 256
    length: int = 128
    width: int = 192
    layers: int = 2
    heads: int = 6

    def __post_init__(self):
        for name, value in vars(self).items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"`{name}` must be an int >= 1, got {value!r}.")
        if self.width % self.heads:
            raise ValueError(
                f"`width` must be a multiple of `heads`, got {self.width} and {self.heads}."
            )


class LanguageModel(nn.Module):
    """Predicts every token from those before it; embedding and output share their weights."""

    def __init__(self, config: LanguageModelConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Parameter(torch.empty(config.length, config.width))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.output = nn.Linear(config.width, config.vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.02)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make the output's weight the embedding's; a copy on another device may need it again."""
        self.output.weight = self.embedding.weight

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Logits, and with labels the mean loss.

        Args:
          input_ids: int64, (batch, tokens), tokens <= config.length.
          labels: as `input_ids` and not shifted: position t is predicted from those before t.

        Returns:
          "logits", float (batch, tokens, vocabulary), of the token that follows; and "loss", a
          scalar in nats per token, where there are labels.
        """
        x = self.embedding(input_ids) + self.positions[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.output(self.norm(x))
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


class Block(nn.Module):
    """Attention to what came before, then two linear layers; both added to their input."""

    def __init__(self, config: LanguageModelConfig):
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.width)
        self.queries_keys_values = nn.Linear(config.width, 3 * config.width)
        self.attention_output = nn.Linear(config.width, config.width)
        self.norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, tokens, width) in and out."""
        split = self.queries_keys_values(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.attention_output(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm(x))))


@torch.no_grad()
def mean_loss(model: nn.Module, tokens: torch.Tensor, *, batch_size: int = 32) -> float:
    """The loss of a model on the host over all `tokens`, int64 (samples, length); in eval mode."""
    training = model.training
    model.eval()
    losses = [
        len(batch) * float(model(input_ids=batch, labels=batch)["loss"])
        for batch in tokens.split(batch_size)
    ]
    model.train(training)
    return sum(losses) / len(tokens)


def loss_of_replicas(
    net: SlowMoDistributedDataParallel,
    config: LanguageModelConfig,
    tokens: torch.Tensor,
    *,
    is_wanted: bool,
) -> float:
    """`mean_loss` of the mean of all processes' replicas; 0 where it is not wanted.

    Args:
      net: a wrapped `LanguageModel`.
      config: its sizes.
      tokens: as for `mean_loss`.
      is_wanted: whether to compute it on this process; all processes must call this.

    Communication: that of `net.consolidated_state_dict()`.
    """
    state = net.consolidated_state_dict()
    if not is_wanted:
        return 0.0
    own = "module."
    model = LanguageModel(config)
    model.load_state_dict({k.removeprefix(own): v for k, v in state.items() if k.startswith(own)})
    return mean_loss(model, tokens)
