"""Configuration of `jaxslowmo sample`."""

import dataclasses

from ..config._fields import Checked, option
from ..config._train import MOST_SEEDS

_SYMBOLS = 256  # the models read and write bytes


@dataclasses.dataclass(frozen=True)
class SampleConfig(Checked):
    """What to write, and how freely."""

    step: int | None = option(
        None, "Of the checkpoint to take the model from (default: the newest).", least=0
    )
    prompt: str = option(
        "\n", "Text to go on from, of which the model sees the end (default: a new line).",
        shows_default=False,
    )  # fmt: skip
    tokens: int = option(200, "Bytes to write.", least=1, below=2**20)
    temperature: float = option(
        0.8,
        "1 draws bytes as the model rates them, less prefers the likely, 0 takes the likeliest.",
        least=0,
    )
    top_k: int = option(
        0, "Draw from so many of the likeliest bytes; 0: all.", least=0, below=_SYMBOLS + 1
    )
    seed: int = option(0, "Of the drawing: the same text every time.", least=0, below=MOST_SEEDS)
