"""The order of gradients in the backward pass, and parameters that cannot reach the loss."""

import json
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js
from jaxslowmo.tree import leaf_names

MIB = 2**20
GOLDEN = Path(__file__).parents[1] / "golden" / "peers" / "bucket_rebuild.json"
REBUILT = [
    case
    for case in json.loads(GOLDEN.read_text())["cases"]
    if case["static_graph"] or not case["find_unused_parameters"]
]


def square(*shape):
    return jax.ShapeDtypeStruct(shape or (4, 4), jnp.float32)


BATCH = square(2, 4)


def names(loss, params, batch=BATCH, **options):
    order = js.gradients.ready_order(loss, params, batch, **options)
    found = leaf_names(params)
    assert sorted(order) == list(range(len(found)))
    return [found[i] for i in order]


def products(use, wrap=lambda layer: layer):
    """A loss that multiplies by the parameters in the order of `use`."""

    def loss(params, x):
        for name in use:
            x = wrap(lambda w, x: jnp.tanh(x @ w))(params[name], x)
        return jnp.sum(x)

    return loss


def test_rebuilt_layouts_of_torch():
    """The layout that torch finds in a first iteration, before any."""
    assert len(REBUILT) >= 10
    for case in REBUILT:
        leaves = [square(*shape) for shape in case["shapes"]]
        use = case["forward_use_order"]

        def loss(params, factors, use=use):
            return sum(jnp.sum(params[i] * factors[i]) for i in use)

        order = js.gradients.ready_order(loss, leaves, leaves)
        assert list(order) == use[::-1]
        cap = case["bucket_cap_mb"]
        limits = (MIB, 25 * MIB) if cap is None else (int(cap * MIB),) * 2
        buckets, _ = js.assign_buckets([leaves[i] for i in order], limits, indices=order)
        assert buckets == [members for _, _, members in case["layout_per_step"][2]]


WRAPPERS = {
    "plain": lambda layer: layer,
    "cast": lambda layer: lambda w, x: layer(w.astype(jnp.bfloat16), x.astype(jnp.bfloat16)),
    "cond": lambda layer: (
        lambda w, x: jax.lax.cond(jnp.sum(x) > 0, layer, lambda w, x: x - layer(w, x), w, x)
    ),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@hypothesis.settings(max_examples=2)
@hypothesis.given(use=st.permutations("abcd"))
def test_order_is_the_reverse_of_use(wrapper, use):
    params = {name: square() for name in "abcd"}
    loss = products(use, WRAPPERS[wrapper])
    for whole in (loss, jax.jit(loss), jax.checkpoint(loss)):
        assert names(whole, params) == use[::-1]


def test_casts_of_all_parameters_in_front_change_nothing():
    """Their gradients are cast back last of all; ready they are where they are computed."""

    def loss(params, x):
        half = jax.tree.map(lambda w: w.astype(jnp.bfloat16).T.reshape(4, 4), params)
        # a is used twice, and ready at the earlier use
        return products("acba")(half, x.astype(jnp.bfloat16)).astype(jnp.float32)

    assert names(loss, {name: square() for name in "abc"}) == ["b", "c", "a"]


def test_loops_finish_all_at_once():
    """What a scan yields comes between what is used behind and before it, as its body does."""

    def loss(params, x):
        def body(x, layer):
            return jnp.tanh(x @ layer["in"]) @ layer["out"] + params["shared"][None], None

        x, _ = jax.lax.scan(body, x @ params["stem"], params["layers"])
        return jnp.sum(x @ params["a_head"])

    params = {
        "a_head": square(),
        "layers": {"in": square(3, 4, 4), "out": square(3, 4, 4)},
        "shared": square(4),
        "stem": square(),
    }
    expected = ["a_head", "shared", "layers/out", "layers/in", "stem"]
    assert names(loss, params) == expected
    assert names(jax.checkpoint(loss), params) == expected


def test_every_signature_and_unused_come_last():
    params = {name: square() for name in "abcd"}

    def full(params, batch, *, rng, model_state):
        noise = jax.random.normal(rng, batch.shape) + model_state["mean"][None]
        loss = products("bac")(params, batch + noise)
        unused = jnp.sum(jax.lax.stop_gradient(params["d"]))
        return loss + unused, ({"x": jnp.ones([])}, model_state)

    state = {"mean": square(4)}
    for rng in (None, jax.random.PRNGKey(0)):
        assert names(full, params, rng=rng, model_state=state) == ["c", "a", "b", "d"]
    arrays = jax.tree.map(lambda s: jnp.ones(s.shape), (params, BATCH))
    assert names(products("bacd"), *arrays) == ["d", "c", "a", "b"]


VECTOR = jax.ShapeDtypeStruct((3,), jnp.float32)


def unused(uses, **shapes):
    """Names that `uses(params, x)` leaves unused, of a, b and c."""
    params = {name: shapes.get(name, VECTOR) for name in "abc"}
    return js.gradients.unused_parameters(lambda p, x: jnp.sum(uses(p, x)), params, VECTOR)


@jax.custom_vjp
def swallow(x):
    return x


swallow.defvjp(lambda x: (x, None), lambda _, ct: (np.zeros(ct.shape, ct.dtype),))


@pytest.mark.parametrize(
    ("uses", "expected"),
    [
        (lambda p, x: p["a"] * p["b"] + p["c"], []),
        (lambda p, x: p["a"] * jax.lax.stop_gradient(p["b"]) + p["b"] * p["c"], []),
        (lambda p, x: p["a"] * jnp.round(p["b"]) + jnp.where(p["c"] > 0, x, 0), ["b", "c"]),
        (lambda p, x: p["a"] * (0 * p["b"] + 1) + 0.0 * jnp.sin(p["c"] @ x), ["b", "c"]),
        (lambda p, x: p["a"] * swallow(p["b"]) + jax.jit(swallow)(p["c"]), ["b", "c"]),
        (lambda p, x: jax.checkpoint(lambda p: jnp.sin(p["b"]))(p), ["a", "c"]),
        (lambda p, x: jnp.where(x > 0, p["b"], p["c"]), ["a"]),
        # Entries of an array are not told apart, here the row of b and c from that of a.
        (lambda p, x: jnp.stack([p["a"], p["b"] * p["c"]])[0], []),
        (lambda p, x: jax.vmap(lambda row: row * p["c"])(jnp.eye(3)), ["a", "b"]),
        # What is zero behind a linear operation stays zero in front of it.
        (lambda p, x: p["a"] + swallow(jnp.pad(p["b"][1:], 1)[:3]) + jnp.cumsum(p["c"]), ["b"]),
        # A single branch is a use.
        (lambda p, x: jax.lax.cond(x[0] > 0, lambda: p["a"], lambda: x), ["b", "c"]),
    ],
)
def test_unused(uses, expected):
    assert unused(uses) == expected


def test_loops():
    """Used is what reaches the loss after any number of iterations, here three."""

    def uses(p, x):
        def body(carry, row):
            one, two, three, lost = carry
            return (one + two * row, two + three, three + p["c"], lost + p["b"]), lost

        zeros = jnp.zeros(3)
        (one, _, _, _), _ = jax.lax.scan(body, (zeros,) * 4, p["a"])
        return one

    rows = jax.ShapeDtypeStruct((5, 3), jnp.float32)
    assert unused(uses, a=rows) == ["b"]
    assert unused(jax.checkpoint(uses), a=rows) == ["b"]
    frozen = lambda p, x: uses({**p, "a": jax.lax.stop_gradient(p["a"])}, x)  # noqa: E731
    assert unused(frozen, a=rows) == ["a", "b"]
