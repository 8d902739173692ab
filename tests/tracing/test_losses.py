"""The order of gradients in the backward pass."""

import json
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

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
    order = js.ready_order(loss, params, batch, **options)
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


@pytest.mark.parametrize("case", REBUILT, ids=lambda case: str(case["id"]))
def test_rebuilt_layout_of_torch(case):
    """The layout that torch finds in a first iteration, before any."""
    leaves = [square(*shape) for shape in case["shapes"]]
    use = case["forward_use_order"]

    def loss(params, factors):
        return sum(jnp.sum(params[i] * factors[i]) for i in use)

    order = js.ready_order(loss, leaves, leaves)
    assert list(order) == use[::-1]
    cap = case["bucket_cap_mb"]
    limits = (MIB, 25 * MIB) if cap is None else (int(cap * MIB),) * 2
    buckets, _ = js.assign_buckets([leaves[i] for i in order], limits, indices=order)
    assert buckets == [members for _, _, members in case["layout_per_step"][2]]


def test_there_are_rebuilt_layouts():
    assert len(REBUILT) >= 10
    assert any(len(case["layout_per_step"][2]) > 3 for case in REBUILT)


WRAPPERS = {
    "plain": lambda layer: layer,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "jit of checkpoint": lambda layer: jax.jit(jax.checkpoint(layer)),
    "custom_jvp": lambda layer: lambda w, x: jax.nn.relu(layer(w, x)),
    "cast": lambda layer: lambda w, x: layer(w.astype(jnp.bfloat16), x.astype(jnp.bfloat16)),
    "cond": lambda layer: (
        lambda w, x: jax.lax.cond(jnp.sum(x) > 0, layer, lambda w, x: x - layer(w, x), w, x)
    ),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@hypothesis.settings(max_examples=3)
@hypothesis.given(use=st.permutations("abcde"))
def test_order_is_the_reverse_of_use(wrapper, use):
    params = {name: square() for name in "abcde"}
    loss = products(use, WRAPPERS[wrapper])
    assert names(loss, params) == use[::-1]
    assert names(jax.jit(loss), params) == use[::-1]
    assert names(jax.checkpoint(loss), params) == use[::-1]


def test_casts_of_all_parameters_in_front_change_nothing():
    """Their gradients are cast back last of all; ready they are where they are computed."""
    inner = products("cab")

    def loss(params, x):
        half = jax.tree.map(lambda w: w.astype(jnp.bfloat16).T.reshape(4, 4), params)
        return inner(half, x.astype(jnp.bfloat16)).astype(jnp.float32)

    assert names(loss, {name: square() for name in "abc"}) == ["b", "a", "c"]


def test_used_twice_is_ready_at_the_earlier_use():
    assert names(products("abca"), {name: square() for name in "abc"}) == ["c", "b", "a"]


def test_loops_finish_all_at_once():
    """What a scan yields comes between what is used behind and before it, as its body does."""

    def loss(params, x):
        def body(x, layer):
            return jnp.tanh(x @ layer["in"]) @ layer["out"] + params["shared"], None

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


def test_unused_come_last():
    params = {name: square() for name in "abcd"}

    def loss(params, x):
        return products("db")(params, x) + jnp.sum(jax.lax.stop_gradient(params["a"]))

    assert names(loss, params) == ["b", "d", "c", "a"]


def test_every_signature():
    params, use = {name: square() for name in "abc"}, products("bac")
    state = {"mean": square(4)}

    def full(params, batch, *, rng, model_state):
        noise = jax.random.normal(rng, batch.shape) + model_state["mean"]
        return use(params, batch + noise), ({"x": jnp.ones([])}, model_state)

    def with_metrics(params, batch):
        return use(params, batch), {"x": jnp.ones([])}

    for loss in (use, with_metrics):
        assert names(loss, params) == ["c", "a", "b"]
        assert names(loss, params, rng=jax.random.key(0)) == ["c", "a", "b"]
    for rng in (None, jax.random.key(0), jax.random.PRNGKey(0)):
        assert names(full, params, rng=rng, model_state=state) == ["c", "a", "b"]
    arrays = jax.tree.map(lambda s: jnp.ones(s.shape), (params, BATCH))
    assert names(use, *arrays) == ["c", "a", "b"]


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_a_mapped_program(mesh_of, check_vma):
    found = []

    def per_device(params, batch):
        varying = jax.tree.map(lambda p: p + 0 * batch[0, 0], params)
        for tree in (params, varying):
            found.append(names(products("bac"), tree, batch))
        return batch

    mesh = mesh_of({"replica": 2})
    lifted = jax.shard_map(
        per_device,
        mesh=mesh,
        in_specs=(P(), P("replica")),
        out_specs=P("replica"),
        check_vma=check_vma,
    )
    jax.eval_shape(lifted, {name: square() for name in "abc"}, square(4, 4))
    assert found == [["c", "a", "b"]] * 2
