"""The transform: a model with a shared table, trained in two stages and as a whole."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js

# Stage 0 looks rows up in its copy, stage 3 multiplies by its own.
GROUPS = [{0: "embed", 3: "head"}]
ROWS = np.array([0, 2, 2, 4])


def whole(table, x):
    return jnp.sum(jnp.tanh(table[ROWS]) * x) + jnp.sum(jnp.sin(x @ table.T))


def steps(tx, first, last, check_vma):
    """Three updates of every stage's copies, in the leaves of these names, stacked."""

    def own_part(params, x):
        """Each device's part of the loss: of leaves that it does not hold it has no gradients."""
        stage = jax.lax.axis_index("stage")
        looked_up = jnp.sum(jnp.tanh(params[first][ROWS]) * x)
        product = jnp.sum(jnp.sin(x @ params[last].T))
        return jnp.where(stage == 0, looked_up, jnp.where(stage == 3, product, 0.0))

    def of_device(params, x):
        params = jax.tree.map(lambda p: p[0], params)
        state = tx.init(params)
        for _ in range(3):
            grads = jax.grad(own_part)(params, x)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return jax.tree.map(lambda p: p[None], params)

    specs = {"in_specs": (P("stage"), P()), "out_specs": P("stage"), "check_vma": check_vma}
    return jax.jit(jax.shard_map(of_device, mesh=js.make_mesh({"stage": 4}), **specs))


@pytest.mark.parametrize(
    ("first", "last", "check_vma"),
    [("embed", "head", True), ("embed", "head", False), ("embed", "embed", True)],
)
def test_copies_move_together_as_the_whole_model_does(first, last, check_vma):
    rng = np.random.default_rng(1)
    table, x = rng.normal(size=(5, 3)).astype("f4"), rng.normal(size=(4, 3)).astype("f4")
    copies = {name: np.broadcast_to(table, (4, 5, 3)) for name in ("embed", "head")}
    tied = js.pipeline.sum_tied_gradients("stage", [{0: first, 3: last}])
    tx = optax.chain(tied, optax.adam(0.1))
    found = steps(tx, first, last, check_vma)(copies, x)
    # Adam of different leaves is compiled twice, and rounded as the compiler likes.
    apart = 0 if first == last else 1e-6
    np.testing.assert_allclose(found[first][0], found[last][3], rtol=0, atol=apart)

    wanted, optimizer = jnp.asarray(table), optax.adam(0.1)
    state = optimizer.init(wanted)
    for _ in range(3):
        updates, state = optimizer.update(jax.grad(whole)(wanted, x), state)
        wanted = wanted + updates
    np.testing.assert_allclose(found[first][0], wanted, rtol=1e-5, atol=1e-5)
    # Elsewhere there were no gradients.
    moved = {(first, 0), (last, 3)}
    for name, copy in found.items():
        still = [stage for stage in range(4) if (name, stage) not in moved]
        np.testing.assert_array_equal(copy[np.array(still)], copies[name][: len(still)])


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"table": (0, 3)}, r"`groups` must be a list of groups such as \[\{0: \"embed/table\""),
        ([("table", 0, 3)], r"each group of `groups` must map stages, ints >= 0, to names"),
        ([{0: "a", -1: "a"}], "must map stages, ints >= 0"),
        ([{0: "a", 1: 2}], "must map stages, ints >= 0"),
        ([{2: "a"}], r"must have two stages or more that hold a copy, got \{2: 'a'\}"),
        ([{0: "a", 1: "b"}, {2: "c", 1: "b"}], r"got 'b' on stage 1 in group 0 and in group 1"),
    ],
)
def test_what_is_no_group(groups, message):
    with pytest.raises(ValueError, match=f"sum_tied_gradients: .*{message}"):
        js.pipeline.sum_tied_gradients("stage", groups)


@pytest.mark.parametrize("axis_name", [("stage", "replica"), 0])
def test_the_stages_are_one_axis(axis_name):
    with pytest.raises(ValueError, match="`axis_name` must be one name"):
        js.pipeline.sum_tied_gradients(axis_name, GROUPS)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{0: "embed", 7: "head"}], r"names stages \[7\] in .*, of 4 stages counted from 0"),
        ([{0: "embed", 1: "tail"}], r"names leaves \['tail'\] that are not among \['bias', 'em"),
        ([{0: "embed", 1: "bias"}], r"equal shapes and dtypes, got embed float32\[5, 3\], bias f"),
        ([{0: "embed", 1: "half"}], r"embed float32\[5, 3\], half bfloat16\[5, 3\]"),
    ],
)
def test_groups_that_do_not_fit_the_gradients(groups, message):
    grads = {
        "embed": jnp.zeros((4, 5, 3)),
        "half": jnp.zeros((4, 5, 3), jnp.bfloat16),
        "bias": jnp.zeros((4, 3)),
    }
    tx = js.pipeline.sum_tied_gradients("stage", groups)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="stage"), grads)


def test_gradients_that_jax_has_summed_are_refused():
    tx = js.pipeline.sum_tied_gradients("stage", [{0: "table", 1: "table"}])

    def of_device(params):
        grads = jax.grad(lambda p: jnp.sum(p["table"] ** 2))(params)
        return tx.update(grads, tx.init(params))[0]

    fn = jax.shard_map(
        of_device, mesh=js.make_mesh({"stage": 4}), in_specs=P(), out_specs=P(), check_vma=True
    )
    with pytest.raises(ValueError, match=r"typed as equal over 'stage', so jax has summed"):
        jax.eval_shape(fn, {"table": jnp.zeros(3)})
