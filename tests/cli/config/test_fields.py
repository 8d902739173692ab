"""Texts of options, and the rules of their values."""

import dataclasses

import pytest

from jaxslowmo.cli.config._fields import (
    Checked,
    check_different,
    option,
    parse_integers,
    parse_names,
    parse_size,
    parse_sizes,
)


@dataclasses.dataclass(frozen=True)
class Config(Checked):
    num_rounds: int | None = option(None, "", least=1)
    share: float = option(0.5, "", least=0, below=1)
    kind: str = option("a", "", choices=("a", "b"))
    as_text: bool = option(False, "", flag="--text")
    nodes: tuple[int, ...] = option("4,8", "", parse=parse_integers)
    other: int = -1  # no option: without rules


def test_fields_are_parsed_and_checked():
    assert Config().nodes == (4, 8)
    assert Config(1, 0, "b", True, (1,)).share == 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_rounds": 0}, "--num-rounds must be >= 1, got 0"),
        ({"share": 1.0}, "--share must be < 1, got 1.0"),
        ({"share": float("nan")}, "--share must be >= 0, got nan"),
        ({"kind": "c"}, "--kind must be one of a, b, got c"),
    ],
)
def test_values_against_their_rules(values, message):
    with pytest.raises(ValueError, match=message):
        Config(**values)


def test_lists_of_names_and_integers():
    assert parse_names("--graphs", " ring, star ,") == ("ring", "star")
    assert parse_integers("--nodes", "4, 8,") == (4, 8)
    with pytest.raises(ValueError, match="--nodes must be integers separated by commas, got 4,x"):
        parse_integers("--nodes", "4,x")
    for values, given in (((), "nothing"), ((4, 4), "4,4")):
        with pytest.raises(ValueError, match=f"--nodes must list .* different sizes, got {given}"):
            check_different("--nodes", values, "sizes")
    check_different("--nodes", (4, 8))


def test_sizes():
    text = "1MiB, 500kB,4096, 0.5gib,7 B"
    assert parse_sizes("--limits", text) == (2**20, 500_000, 4096, 2**29, 7)
    assert parse_size("--first", "25mib") == 25 * 2**20
    with pytest.raises(ValueError, match="--first takes sizes such as 25MiB, 500kB or 4096, got x"):
        parse_size("--first", "x")
