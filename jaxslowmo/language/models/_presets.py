"""Named model sizes."""

import dataclasses

from ._gpt import GPTConfig

# A test holds the numbers of parameters.
GPT_PRESETS: dict[str, GPTConfig] = {
    # 0.01M: seconds; to try out a cluster, learns next to nothing.
    "tiny": GPTConfig(num_layers=1, num_heads=2, embed_dim=16, context_length=16),
    # 0.45M: minutes on a laptop's CPU, four replicas included.
    "demo": GPTConfig(num_layers=2, num_heads=4, embed_dim=128, context_length=64),
    "1m": GPTConfig(num_layers=5, num_heads=4, embed_dim=128, context_length=128),
    "10m": GPTConfig(num_layers=6, num_heads=6, embed_dim=384, context_length=256),
    # Width, heads and context of GPT-2 small. A third of its 124M parameters embed 50,257 word
    # pieces; bytes need none of them, so 17 blocks instead of 12 bring the count back (121.5M).
    "124m": GPTConfig(num_layers=17, num_heads=12, embed_dim=768, context_length=1024),
    # Layers, heads and width of the usual 7B models (6.45B): for many devices per replica, or for
    # shapes without arrays.
    "7b": GPTConfig(num_layers=32, num_heads=32, embed_dim=4096, context_length=2048, remat=True),
}
"""Shapes by name: `tiny`, `demo`, `1m`, `10m`, `124m`, `7b`, as `num_parameters` counts them."""


def gpt_preset(name: str, *, dtype: str = "float32") -> GPTConfig:
    """The preset called `name`, computing in `dtype`.

    Args:
      name: one of `GPT_PRESETS`.
      dtype: what it computes in, `"float32"`, `"bfloat16"` or `"float16"`; parameters are float32.

    Returns:
      The shape of the model.

    Raises:
      ValueError: for an unknown name or dtype.
    """
    if name not in GPT_PRESETS:
        raise ValueError(f"`preset` must be one of {', '.join(GPT_PRESETS)}, got {name!r}.")
    return dataclasses.replace(GPT_PRESETS[name], dtype=dtype)
