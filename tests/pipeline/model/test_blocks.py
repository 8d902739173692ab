"""Which layers a stage has: even, as a partition says, or refused."""

import re

import pytest

import jaxslowmo as js
from jaxslowmo.pipeline.model import model_blocks


def test_without_parts_stages_are_as_even_as_can_be():
    assert model_blocks(7, 3) == ((0, 2), (2, 4), (4, 7))
    assert model_blocks(8, 2, 2) == ((0, 2), (2, 4), (4, 6), (6, 8))


def test_parts_are_dealt_in_the_order_of_the_model():
    assert model_blocks(8, 2, 2, js.partition_uniform(8, 2, 2)) == ((0, 2), (2, 4), (4, 6), (6, 8))
    assert model_blocks(5, 2, 1, [[(0, 4)], [(4, 5)]]) == ((0, 4), (4, 5))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 3), "3 stages and the model 2 layers"),
        ((3, 2, 2), "2 stages * 2 chunks and the model 3 layers"),
        ((4, 2, 1, [[(0, 4)]]), "for each of the 2 stages"),
        ((4, 2, 1, [[(0, 2)], [(2, 3), (3, 4)]]), "1 [start, end) for each"),
        ((4, 2, 1, [2, 2]), "for each of the 2 stages of `schedule`, got [2, 2]"),
        ((4, 2, 1, [[(0, 2.5)], [(2.5, 4)]]), "got [[(0, 2.5)], [(2.5, 4)]]"),
        ((4, 2, 1, "ab"), "got 'ab'"),
        ((4, 2, 1, [[(0, 4)], [(4, 4)]]), "a stage without layers, [4, 4)"),
        ((4, 2, 1, [[(0, 2)], [(3, 4)]]), "cover the 4 layers of the model once each"),
        ((4, 2, 1, [[(0, 3)], [(2, 4)]]), "cover the 4 layers of the model once each"),
        ((5, 2, 1, [[(0, 2)], [(2, 4)]]), "cover the 5 layers of the model once each"),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        model_blocks(*arguments)
