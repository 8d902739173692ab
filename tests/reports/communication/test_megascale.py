"""How transfers between TPU slices are written."""

import pytest

from jaxslowmo.reports.communication._hlo import parse_target


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"{1,2}x{0:1}"', (((0, 2), (1, 3)), False)),
        ('"{1:3}x{1}"', (((1, 3, 5),), False)),
        ("{{100000,200000},{100001,200001}}", (((0, 2), (1, 3)), False)),
        ("{{100000->200001},{200001->100000}}", (((0, 3), (3, 0)), True)),
        ("{}", (None, False)),
    ],
)
def test_targets_of_transfers_between_slices(text, expected):
    assert parse_target(text, 2) == expected
