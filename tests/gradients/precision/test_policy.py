"""What a loss is given to compute in, and what it gives back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js
from jaxslowmo.gradients.precision import computing_in

TREE = {
    "decoder": {"norm": jnp.ones(2), "dense": [jnp.ones(2), jnp.ones(2, jnp.bfloat16)]},
    "rows": jnp.arange(2),
    "key": jax.random.key(0),
    "wave": jnp.ones(1, jnp.complex64),
    "host": np.ones(2, np.float64),
    "number": 0.5,
}


def dtypes(tree):
    return [str(jnp.result_type(x)) for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_all_real_floating_leaves_are_cast(name):
    cast = js.Policy(name).cast(TREE)
    assert jax.tree.structure(cast) == jax.tree.structure(TREE)
    assert dtypes(cast["decoder"]) == [name] * 3
    assert dtypes([cast["host"], cast["number"]]) == [name] * 2
    for same in ("rows", "key", "wave"):
        assert cast[same] is TREE[same]


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ("decoder/norm", [False, False, True]),
        ("decoder", [True, True, True]),
        (("*/norm", "*/dense/0"), [True, False, True]),
        (["decoder/d*"], [True, True, False]),
        ("norm", [False, False, False]),
    ],
)
def test_names_that_are_kept(keep, kept):
    cast = js.Policy("float16", keep=keep).cast(TREE)["decoder"]
    found = [x is y for x, y in zip(*map(jax.tree.leaves, (cast, TREE["decoder"])), strict=True)]
    assert found == kept


def test_dtypes_as_jax_names_them():
    assert js.Policy(jnp.bfloat16) == js.Policy("bfloat16")
    assert hash(js.Policy(np.float16, keep=["a"])) == hash(js.Policy("float16", keep=("a",)))
    assert js.Policy() == js.Policy("float32")


def test_a_loss_computes_in_it_and_returns_float32():
    seen = {}

    def loss(params, batch, *, rng, model_state, embedded):
        seen.update(params=params, batch=batch, embedded=embedded, state=model_state)
        value = (params * batch["x"] * embedded).sum()
        metrics = {"value": value, "count": batch["n"].sum()}
        return value, (metrics, {"mean": value, "steps": model_state["steps"] + 1})

    cast = computing_in(js.Policy("bfloat16", keep="n*"), loss)
    x, steps = jnp.float32([1.001, 2.0]), {"mean": jnp.float32(0.5), "steps": jnp.int32(3)}
    batch = {"x": x, "n": jnp.float32([1, 2])}

    def full(params):
        return cast(params, batch, rng=jax.random.key(0), model_state=steps, embedded=x)

    (value, (metrics, after)), grads = jax.value_and_grad(full, has_aux=True)(x)
    assert dtypes((seen["params"], seen["batch"], seen["embedded"])) == [
        "bfloat16",
        "float32",
        "bfloat16",
        "bfloat16",
    ]
    assert dtypes((value, metrics, after)) == ["float32", "float32", "float32", "float32", "int32"]
    assert seen["state"]["mean"].dtype == jnp.float32
    assert grads.dtype == jnp.float32
    np.testing.assert_array_equal(grads, [1.0, 4.0])  # 1.001 is 1 in bfloat16
    assert after["steps"] == 4


@pytest.mark.parametrize("compute", ["float64", "fp16", "int8", 3, None])
def test_other_dtypes_are_refused(compute):
    with pytest.raises(ValueError, match="Policy: `compute` must be one of"):
        js.Policy(compute)


@pytest.mark.parametrize("keep", [("",), (1,), ({"a": 1},), 3])
def test_names_are_strings(keep):
    with pytest.raises(ValueError, match="Policy: `keep` must be names"):
        js.Policy("float16", keep=keep)


def test_a_name_that_is_nowhere():
    loss = computing_in(js.Policy("float16", keep=("a", "x")), lambda *args, **known: None)
    with pytest.raises(ValueError, match=r"`keep` must name leaves.*got 'x'; leaves are a, b"):
        loss({"a": jnp.ones(1)}, {"b": jnp.ones(1)}, rng=None, model_state=())
