"""What travels in buckets is what a mean of every leaf would be, however they are cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxslowmo as js
from support.bad_input import one_update, trace
from support.executions import lift

WORLD = 4
DTYPES = ["float32", "bfloat16", "float16"]
leaf_kinds = st.tuples(
    st.sampled_from([(), (3,), (0, 2), (5, 4), (2, 3, 2), (40, 30)]), st.sampled_from(DTYPES)
)


@st.composite
def reductions(draw):
    """Gradients by name, and how they are put into buckets."""
    kinds = draw(st.lists(leaf_kinds, min_size=1, max_size=5))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    # Whole numbers: their sums are exact in every dtype, in any order.
    grads = {
        f"g{i}": rng.integers(-8, 9, size=(WORLD, *shape)).astype(jnp.dtype(dtype))
        for i, (shape, dtype) in enumerate(kinds)
    }
    order = draw(st.permutations(range(len(kinds))))
    if draw(st.booleans()):  # explicit buckets: of one dtype each, some by name
        by_dtype: dict[str, list[int | str]] = {}
        for i in order:
            by_dtype.setdefault(kinds[i][1], []).append(draw(st.sampled_from([i, f"g{i}"])))
        cut = draw(st.integers(1, 3))
        buckets = [g[k : k + cut] for g in by_dtype.values() for k in range(0, len(g), cut)]
        return grads, {"buckets": buckets}
    limits = st.sampled_from([0, 16, 100, 4096, 2**20])
    layout = {
        "order": draw(st.sampled_from(["reverse", "forward", tuple(order)])),
        "bucket_bytes": draw(limits),
        "first_bucket_bytes": draw(limits),
        "split_large": draw(st.booleans()),
        "max_buckets": draw(st.sampled_from([None, len(DTYPES), len(DTYPES) + 2])),
    }
    return grads, layout


@settings(max_examples=6)
@given(reductions())
def test_exact_hooks_are_a_mean_of_every_leaf(case):
    grads, layout = case
    # What a hook is given is whole and in order: taken apart and put together it is the same.
    again = js.hooks.stateless(
        lambda bucket: jax.lax.pmean(bucket.join(bucket.split(bucket.flat)), bucket.axis_name)
    )
    hooks = (None, js.hooks.mean(), again)
    transforms = [js.all_reduce_gradients("replica", hook=h, **layout) for h in hooks]
    run = jax.vmap(
        lambda g: [tx.update(g, tx.init(g))[0] for tx in transforms], axis_name="replica"
    )
    for found in jax.tree.map(np.asarray, jax.jit(run)(grads)):
        assert list(found) == list(grads)
        for name, grad in grads.items():
            assert (found[name].shape, found[name].dtype) == (grad.shape, grad.dtype)
            mean = np.mean(grad.astype(np.float32), axis=0)  # quarters: exact too
            for replica in range(WORLD):
                np.testing.assert_array_equal(found[name][replica].astype(np.float32), mean)


# Elements: 96 * 64 + 64 * 33 + 33, in buckets of [kernel, embedding] and [bias].
SHAPES = {"bias": (33,), "embedding": (96, 64), "kernel": (64, 33)}
WHOLE = 4 * (96 * 64 + 64 * 33 + 33)


@pytest.mark.parametrize(
    ("hook", "kind", "count", "sent", "dtype"),
    [
        (js.hooks.bf16_compress(), "every", 2, WHOLE // 2, "bfloat16"),
        (js.hooks.noop(), "every", 0, 0, None),
    ],
)
def test_what_each_hook_sends(hook, kind, count, sent, dtype):
    tx = js.all_reduce_gradients("replica", hook=hook, buckets=[["kernel", "embedding"], ["bias"]])
    grads = {n: jax.ShapeDtypeStruct((WORLD, *s), jnp.float32) for n, s in SHAPES.items()}
    program = lift(one_update(tx), {"replica": WORLD}, "shard_map", (False,))
    report = js.comm_report_of(program.lower(grads), compile=False)
    rows = report.select(axis="replica", kind=kind, level="emitted")
    assert report.count(axis="replica", kind=kind) == count
    assert report.bytes(axis="replica", kind=kind) == sent
    assert {(r.collective, r.dtypes) for r in rows} == (
        {("all-reduce", (dtype,))} if dtype else set()
    )


def test_a_hook_sees_what_is_in_its_bucket():
    seen = []

    def look(bucket):
        seen.append(bucket)
        return jax.lax.pmean(bucket.flat, bucket.axis_name)

    grads = {"a": np.ones((4, 40, 50), np.float32), "b": np.ones((4, 3), np.float32)}
    layout = {"bucket_bytes": 4096, "first_bucket_bytes": 12, "split_large": True}
    tx = js.all_reduce_gradients("replica", hook=js.hooks.stateless(look), **layout)
    trace(one_update(tx), grads)
    named = [[(p.name, p.start, p.stop, p.is_whole) for p in b.pieces] for b in seen]
    assert named == [[("b", 0, 3, True)], [("a", 0, 1024, False)], [("a", 1024, 2000, False)]]
    assert [(b.index, b.is_last) for b in seen] == [(0, False), (1, False), (2, True)]
    assert [p.part_shape for b in seen for p in b.pieces] == [(3,), (1024,), (976,)]
