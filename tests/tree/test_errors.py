"""Leaves, limits and buckets that cannot be used are refused, by what is wrong with them."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxslowmo as js
from jaxslowmo.tree import check_arrays, check_floating, plan_buffers
from support.refusals import Refusal, each

LEAVES = [np.zeros(2, np.float32)] * 2
OTHERS = {
    "ok": np.zeros(1, np.float16),
    "layer": {"steps": np.zeros(1, np.int32)},
    "phase": np.zeros(1, np.complex64),
    "key": jax.random.key(0),
    "number": 1,
}


def assigned(argument, value="", limits=(0,), leaves=LEAVES, **options):
    return Refusal(lambda: js.assign_buckets(leaves, limits, **options), argument, value)


def given(buckets, value, leaves=LEAVES):
    return Refusal(lambda: plan_buffers(leaves, buckets=buckets), "`buckets`", value)


def not_floating(said):
    return Refusal(lambda: check_floating("owner", OTHERS), "owner", said)


ROWS = {
    "no limits": assigned("`limits`", "none", ()),
    "a flag too few": assigned("`expect_sparse`", "label 1, got 1", expect_sparse=[True]),
    "too few": assigned("`max_buckets`", "least 2", expect_sparse=[0, 1], max_buckets=1),
    "alone and cut": assigned("`alone_bytes`", "`split_large`", alone_bytes=4, split_large=True),
    "a leaf in no bucket": given([[0]], "missing [1]"),
    "an int32 leaf": not_floating("layer/steps (int32), number"),
    "leaves that are no arrays": Refusal(
        lambda: check_arrays("owner", {"a": jnp.ones(2), "f": lambda: 0, "s": "relu"}),
        "owner",
        "got f (function), s (str)",
    ),
}


@each(ROWS)
def test_refused(refusal):
    refusal.check()
