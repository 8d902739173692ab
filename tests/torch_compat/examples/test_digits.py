import pytest
import torch

from torch_compat.examples.digits import CLASSES, SIZE, DigitNet, Digits


def test_the_same_arguments_draw_the_same_pictures():
    pictures, digits = Digits(100, seed=(0, 0)).tensors
    assert pictures.shape == (100, 1, SIZE, SIZE)
    assert pictures.dtype == torch.float32
    assert torch.bincount(digits).tolist() == [10] * CLASSES
    again, other = Digits(100, seed=(0, 0)).tensors, Digits(100, seed=(0, 1)).tensors
    assert torch.equal(again[0], pictures)
    assert torch.equal(again[1], digits)
    assert not torch.equal(other[0], pictures)
    assert not torch.equal(other[1], digits)


def test_a_digit_is_drawn_in_many_ways_and_looks_most_like_itself():
    pictures, digits = Digits(2000, seed=(3,)).tensors
    assert len(torch.unique(pictures, dim=0)) == 2000
    means = torch.stack([pictures[digits == digit].mean(0) for digit in range(CLASSES)])
    distances = torch.cdist(pictures.flatten(1), means.flatten(1))
    right = (distances.argmin(1) == digits).float().mean()
    assert 0.5 < right < 0.95  # not without learning


def test_the_net_sees_pictures_as_they_are_drawn():
    pictures, _ = Digits(3, seed=(0,)).tensors
    assert DigitNet()(pictures).shape == (3, CLASSES)


def test_no_pictures():
    with pytest.raises(ValueError, match="`num_samples` must be >= 1, got 0"):
        Digits(0, seed=(0,))
