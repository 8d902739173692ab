"""Neighbour exchange by partial permutations, in every execution."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from jaxslowmo.collectives import permute
from support.executions import lift

NODES = 4
PERMUTATIONS = {
    "whole": ((0, 1), (1, 2), (2, 3), (3, 0)),
    "swap": ((0, 2), (2, 0)),
    "path": ((0, 1), (1, 2), (2, 3)),
    "one": ((3, 1),),
    "to itself": ((0, 0), (1, 3)),
    "none": (),
}


def expected(x: np.ndarray, permutation) -> np.ndarray:
    out = np.zeros_like(x)
    for source, destination in permutation:
        out[destination] = x[source]
    return out


def emitted(text: str) -> list[list[tuple[int, int]]]:
    """The pairs of each collective-permute of a lowered program, sorted."""
    pairs = []
    for numbers in re.findall(r"source_target_pairs = dense<(\[\[.*?\]\])>", text):
        found = [int(n) for n in re.findall(r"\d+", numbers)]
        pairs.append(sorted(zip(found[::2], found[1::2], strict=True)))
    return pairs


@pytest.mark.parametrize("execution", ["vmap", "pmap", "shard_map"])
def test_receives_what_the_source_sends_or_zeros(execution):
    """Of nodes that do not send not even NaN arrives; devices send the existing pairs alone."""
    x = np.arange(1.0, 1 + 3 * NODES, dtype=np.float32).reshape(NODES, 3)
    only_3 = np.where(np.arange(NODES)[:, None] == 3, x, np.float32(np.nan))
    cases = [(x, permutation) for permutation in PERMUTATIONS.values()]
    cases += [(x.astype(dtype), PERMUTATIONS["path"]) for dtype in (jnp.bfloat16, np.int32)]
    cases += [(only_3, PERMUTATIONS["one"])]

    def program(*values):
        return [permute(v, "replica", p) for v, (_, p) in zip(values, cases, strict=True)]

    program = lift(program, {"replica": NODES}, execution, (False,) * len(cases))
    lowered = program.lower(*(value for value, _ in cases))
    found = lowered.compile()(*(value for value, _ in cases))
    for after, (value, permutation) in zip(found, cases, strict=True):
        assert after.dtype == value.dtype
        np.testing.assert_array_equal(after, expected(value, permutation))
    if execution != "vmap":
        wanted = [sorted(permutation) for _, permutation in cases if permutation]
        assert [pairs for pairs in emitted(lowered.as_text()) if pairs] == wanted
