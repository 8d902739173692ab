"""Pictures of digits that are on every machine: drawn from a small font, and a net that reads them.

They have the shape of MNIST, which can take their place where torchvision is installed:
`torchvision.datasets.MNIST(folder, train=..., download=True, transform=ToTensor())` instead of
`Digits(...)`.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

SIZE = 28
CLASSES = 10
# Ten digits of 7 rows and 5 columns, "1" where there is ink.
_FONT = (
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00010 00100 01000 11111",
    "11111 00010 00100 00010 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
)
_NOISE = 0.25  # standard deviation, of ink that is 1


class Digits(TensorDataset):
    """Pairs of a float32 picture (1, 28, 28), ink about 1 and paper about 0, and its digit, int64.

    Every picture is scaled, turned, slanted and moved at random, and noisy. The same arguments give
    the same pictures.

    Args:
      num_samples: how many; all digits come equally often, up to one.
      seed: integers that name the set, such as (0, 1).

    Raises:
      ValueError: if `num_samples` is not positive.
    """

    def __init__(self, num_samples: int, *, seed: tuple[int, ...]):
        if num_samples < 1:
            raise ValueError(f"`num_samples` must be >= 1, got {num_samples}.")
        rng = np.random.default_rng(seed)
        digits = torch.from_numpy(rng.permutation(num_samples) % CLASSES)
        glyphs = _glyphs()[digits]
        grid = F.affine_grid(_views(rng, num_samples), [num_samples, 1, SIZE, SIZE], False)
        pictures = F.grid_sample(glyphs, grid, align_corners=False)
        noise = rng.normal(scale=_NOISE, size=pictures.shape)
        super().__init__(pictures + torch.tensor(noise, dtype=torch.float32), digits)


class DigitNet(nn.Module):
    """Two convolutions with batch normalization, two linear layers."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, width, 5), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(width, 2 * width, 5), nn.BatchNorm2d(2 * width), nn.ReLU()),
            *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * width, 4 * width), nn.ReLU()),
            nn.Linear(4 * width, CLASSES),
        )

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """Logits (batch, 10) of pictures (batch, 1, 28, 28)."""
        return self.layers(pictures)


def _glyphs() -> torch.Tensor:
    """The font, (10, 1, 7, 5) float32."""
    rows = [[[float(dot) for dot in row] for row in glyph.split()] for glyph in _FONT]
    return torch.tensor(rows).unsqueeze(1)


def _views(rng: np.random.Generator, number: int) -> torch.Tensor:
    """(number, 2, 3): where each picture looks at its glyph, both in [-1, 1]."""
    angle = rng.uniform(-0.25, 0.25, number)
    slant = rng.uniform(-0.2, 0.2, number)
    width, height = rng.uniform(1.6, 2.4, number), rng.uniform(1.2, 1.7, number)
    moved = rng.uniform(-0.3, 0.3, (2, number))
    rows = [
        [width * np.cos(angle), width * (np.sin(angle) + slant), moved[0]],
        [-height * np.sin(angle), height * np.cos(angle), moved[1]],
    ]
    return torch.tensor(np.stack([np.stack(row, -1) for row in rows], 1), dtype=torch.float32)
