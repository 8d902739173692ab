"""Pictures of digits, drawn from a small font on any machine, and a net that classifies them.

They have the shape of MNIST, which can replace them if torchvision is installed:
`torchvision.datasets.MNIST(folder, train=..., download=True, transform=ToTensor())`.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

SIZE = 28
CLASSES = 10
# The ten digits, in 7 rows and 5 columns each.
_FONT = """
.###. ..#.. .###. ##### ...#. ##### ..##. ##### .###. .###.
#...# .##.. #...# ...#. ..##. #.... .#... ....# #...# #...#
#..## ..#.. ....# ..#.. .#.#. ####. #.... ...#. #...# #...#
#.#.# ..#.. ...#. ...#. #..#. ....# ####. ..#.. .###. .####
##..# ..#.. ..#.. ....# ##### ....# #...# .#... #...# ....#
#...# ..#.. .#... #...# ...#. #...# #...# .#... #...# ...#.
.###. .###. ##### .###. ...#. .###. .###. .#... .###. .##..
"""


class Digits(TensorDataset):
    """Pairs of a float32 picture (1, 28, 28), ink about 1 and paper about 0, and its int64 digit.

    Every picture is randomly scaled, rotated, sheared and shifted, with noise. All digits are
    equally frequent. The same arguments give the same pictures; `seed` is a tuple such as (0, 1).
    """

    def __init__(self, num_samples: int, *, seed: tuple[int, ...]):
        rng = np.random.default_rng(seed)
        digits = torch.from_numpy(rng.permutation(num_samples) % CLASSES)
        font = np.array([[list(glyph) for glyph in row.split()] for row in _FONT.split("\n")[1:-1]])
        glyphs = torch.tensor(font == "#", dtype=torch.float32).transpose(0, 1)[digits, None]
        # Affine maps from a picture to its glyph, both in [-1, 1].
        low, high = [[1.6, -0.5, -0.3], [-0.4, 1.2, -0.3]], [[2.4, 0.5, 0.3], [0.4, 1.7, 0.3]]
        maps = torch.tensor(rng.uniform(low, high, (num_samples, 2, 3)), dtype=torch.float32)
        grid = F.affine_grid(maps, [num_samples, 1, SIZE, SIZE], align_corners=False)
        noise = torch.tensor(rng.normal(scale=0.25, size=(num_samples, 1, SIZE, SIZE)))
        super().__init__(F.grid_sample(glyphs, grid, align_corners=False) + noise.float(), digits)


class DigitNet(nn.Sequential):
    """Two convolutions with batch normalization, two linear layers; (n, 1, 28, 28) to (n, 10)."""

    def __init__(self, width: int = 8):
        super().__init__(
            *(nn.Conv2d(1, width, 5), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(width, 2 * width, 5), nn.BatchNorm2d(2 * width), nn.ReLU()),
            *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * width, 4 * width), nn.ReLU()),
            nn.Linear(4 * width, CLASSES),
        )
