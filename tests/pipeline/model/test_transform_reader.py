"""What a transform's result for a leaf depends on: read from its program, and found by changes.

The oracle shares no code with the reader. It changes one leaf and looks at the others, and it cuts
all elements into other arrays and compares the elements.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import jaxslowmo as js
from jaxslowmo.pipeline.model._transform_reader import ProgramReader
from recipes.optax_cases import CASES
from support.promotion import promoting

SHAPES = {"b": (4,), "head": (3, 3), "w": (5, 3)}
SIZES = {name: int(np.prod(shape)) for name, shape in SHAPES.items()}
EXTRA = ("value", "grad", "value_fn")
UPDATES = 3
DRAW = np.random.default_rng(0).normal
DRAWN = [DRAW(size=sum(SIZES.values())).astype(np.float32) for _ in range(UPDATES + 1)]


def as_tree(flat):
    parts = np.split(flat, np.cumsum([*SIZES.values()])[:-1])
    return {name: x.reshape(SHAPES[name]) for name, x in zip(SHAPES, parts, strict=True)}


def as_flat(tree):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


TREES = [as_tree(x) for x in DRAWN]


def no_bias(tree):
    return jax.tree_util.tree_map_with_path(lambda path, _: "b" not in str(path[0].key), tree)


def is_matrix(tree):
    return jax.tree.map(lambda x: x.ndim > 1, tree)


def small(tree):
    """Say the same of all leaves, and another thing of what they are packed into."""
    return jax.tree.map(lambda x: x.size < 20, tree)


def of_leaves(update):
    return optax.stateless(lambda updates, params: update(updates))


def every(update):
    return of_leaves(lambda tree: jax.tree.map(update, tree))


def counted(update):
    """A transform with a counter; `update(count, updates)`."""
    return optax.GradientTransformation(
        lambda params: jnp.zeros([], jnp.int32),
        lambda updates, count, params=None: (update(count, updates), count + 1),
    )


@jax.custom_jvp
def clipped(x):
    return jnp.where(x > 1, 1.0, x)


clipped.defjvp(lambda primals, tangents: (clipped(*primals), tangents[0]))


def scanned(tree):
    """Scale all leaves in one loop, whose carry they share."""

    def step(carry, factor):
        return {name: x * factor for name, x in carry.items()}, factor

    return lax.scan(step, tree, jnp.ones(3))[0]


def scanned_norms(tree):
    def step(carry, _):
        return {"b": carry["b"] / 2, "head": carry["head"], "w": carry["w"] + carry["b"][0]}, 0.0

    return lax.scan(step, tree, None, length=2)[0]


def looped(tree):
    first = {"i": 0, **tree}
    last = lax.while_loop(
        lambda now: now["i"] < 3,
        lambda now: {name: x + 1 if name == "i" else x / 2 for name, x in now.items()},
        first,
    )
    return {name: last[name] for name in tree}


def until_small(tree):
    return lax.while_loop(
        lambda now: jnp.sum(now["b"]) > 1.0, lambda now: jax.tree.map(lambda x: x / 2, now), tree
    )


def remembering_a_norm():
    """The norm of one update scales the next one."""
    return optax.GradientTransformation(
        lambda params: jnp.ones([]),
        lambda updates, norm, params=None: (
            jax.tree.map(lambda x: x / norm, updates),
            optax.tree.norm(updates),
        ),
    )


def from_the_first_norm():
    return optax.GradientTransformation(
        optax.tree.norm,
        lambda updates, norm, params=None: (jax.tree.map(lambda x: x / norm, updates), norm),
    )


def unread_norm():
    return optax.GradientTransformation(
        lambda params: jnp.zeros([]),
        lambda updates, norm, params=None: (updates, optax.tree.norm(updates)),
    )


ELEMENTS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "nesterov": optax.sgd(0.7, momentum=0.9, nesterov=True),
    "adam": optax.adam(0.1),
    "half": promoting(optax.adam(0.1, mu_dtype=jnp.bfloat16)),
    "adamw": promoting(optax.adamw(optax.cosine_decay_schedule(0.1, 20), weight_decay=0.1)),
    "mask of all": optax.adamw(0.1, mask=lambda tree: jax.tree.map(lambda x: True, tree)),
    "lion": optax.lion(0.1),
    "rmsprop": optax.rmsprop(0.1),
    "clip": optax.chain(optax.clip(0.5), optax.sgd(0.1)),
    "injected": optax.inject_hyperparams(optax.adam)(0.1),
    "several": promoting(optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation()),
    "schedule free": optax.contrib.schedule_free_sgd(0.1),
    "ema": optax.ema(0.9),
    "slow momentum": js.slow_momentum(0.5),
    "nesterov slow momentum": js.slow_momentum(0.5, nesterov=True),
    "custom jvp": every(clipped),
    "jit": of_leaves(jax.jit(lambda tree: jax.tree.map(jnp.tanh, tree))),
    "remat": every(jax.checkpoint(jnp.sin)),
    "cond": counted(lambda n, x: lax.cond(n > 1, lambda: x, lambda: jax.tree.map(jnp.sign, x))),
}
LEAVES = {
    "mask by name": optax.adamw(0.1, weight_decay=0.5, mask=no_bias),
    "mask by rank": optax.adamw(0.1, weight_decay=0.5, mask=is_matrix),
    "masked": optax.chain(optax.masked(optax.scale(2.0), no_bias), optax.sgd(0.1)),
    "partition": optax.partition({True: optax.adam(0.1), False: optax.sgd(0.1)}, no_bias),
    "lamb": optax.lamb(0.1),
    "lars": optax.lars(0.1),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "sm3": optax.sm3(0.1),
    "block rms": optax.clip_by_block_rms(0.1),
    "centralize": optax.centralize(),
    "muon": optax.contrib.muon(0.1, ns_steps=1),
    "noise": promoting(optax.add_noise(0.1, 0.5, 0)),
    "mean": every(lambda x: x - jnp.mean(x)),
    "by rank": every(lambda x: x / (1 + x.ndim)),
    "neighbours": every(lambda x: x[::-1]),
    "scan": of_leaves(scanned),
    "while": of_leaves(looped),
    "unread norm": unread_norm(),
}
MIXING = {
    "global norm": optax.clip_by_global_norm(1e-3),
    "far global norm": optax.chain(optax.clip_by_global_norm(1e4), optax.sgd(0.1)),
    "all finite": optax.apply_if_finite(optax.sgd(0.1), 3),
    "prodigy": promoting(optax.contrib.prodigy()),
    "remembered norm": remembering_a_norm(),
    "first norm": from_the_first_norm(),
    "scan of several": of_leaves(scanned_norms),
    "while of one": of_leaves(until_small),
    "cond of one": of_leaves(
        lambda x: lax.cond(x["b"][0] > 0, lambda: x, lambda: jax.tree.map(jnp.sign, x))
    ),
    "flatten": optax.flatten(optax.adam(0.1)),  # not proved
    "needs more": optax.GradientTransformationExtraArgs(
        lambda params: (), lambda updates, state, params=None, *, curvature: (updates, state)
    ),
}
KINDS = {
    **dict.fromkeys(ELEMENTS, "element-wise"),
    **dict.fromkeys(LEAVES, "leaf-wise"),
    **dict.fromkeys(MIXING, "mixing"),
}
ALL = {**ELEMENTS, **LEAVES, **MIXING}
UNCHANGED = {"far global norm", "all finite", "prodigy", "flatten", "needs more"}


def updates_of(tx, trees):
    """Return what a transform makes of trees, the first of which are the parameters."""
    tx = optax.with_extra_args_support(tx)
    params, *grads = trees
    state, made = tx.init(params), []
    for each in grads:
        updates, state = jax.jit(tx.update)(each, state, params)
        params = optax.apply_updates(params, updates)
        made.append(updates)
    return made


def depends_on_others(tx):
    """Return whether a change of one leaf changes the results for another one."""
    known = updates_of(tx, TREES)
    for name in SHAPES:
        changed = [{**tree, name: 0.5 - 3 * tree[name]} for tree in TREES]
        for x, y in zip(known, updates_of(tx, changed), strict=True):
            if any(not np.array_equal(x[other], y[other]) for other in SHAPES if other != name):
                return True
    return False


def equals_on_shards(tx):
    """Return whether elements have the same results in two arrays that hold all of them."""
    known = [as_flat(x) for x in updates_of(tx, TREES)]
    shards = [tuple(x.reshape(2, 2, 7)) for x in DRAWN]
    found = [as_flat(x) for x in updates_of(tx, shards)]
    return np.allclose(known, found, rtol=1e-5, atol=1e-6)


def read(tx, params=TREES[0], **options):
    return ProgramReader().read(tx, params, **options)


@pytest.mark.parametrize("name", ALL)
def test_the_kind_is_proved(name):
    reading = read(ALL[name])
    assert reading.kind == KINDS[name], reading.why
    assert bool(reading.why) == (name not in ELEMENTS)
    assert reading.by_element >= (name in ELEMENTS)


@pytest.mark.parametrize("name", ALL)
def test_the_kind_is_true(name):
    """As far as changes show it: not every mixture shows, and noise depends on more than values."""
    if name == "needs more":
        return
    assert depends_on_others(ALL[name]) == (name in MIXING and name not in UNCHANGED)
    if name in ELEMENTS:
        assert equals_on_shards(ALL[name])
    elif name in {"mask by rank", "lamb", "block rms", "mean", "centralize", "neighbours"}:
        assert not equals_on_shards(ALL[name])


@pytest.mark.parametrize("name", [n for cases in CASES.values() for n in cases])
@pytest.mark.filterwarnings("ignore")  # deprecations of optax
def test_what_is_read_of_optax_is_true(name):
    (case,) = [cases[name] for cases in CASES.values() if name in cases]
    tx = promoting(case.make())
    reading = read(tx)
    if reading.kind == "mixing":
        return  # it may mix, or need what nobody gives it here
    assert not depends_on_others(tx)
    if reading.kind == "element-wise":
        shards = tuple(DRAWN[0].reshape(2, 2, 7))
        reader = ProgramReader()
        whole, cut = reader.read(tx, TREES[0]), reader.read(tx, shards)
        assert not whole.equals_on_buffers(cut, [0, 2]) or equals_on_shards(tx)


PARTS = {
    "clip": (optax.clip(0.3), 0),
    "adam": (optax.scale_by_adam(), 0),
    "momentum": (optax.trace(0.5), 0),
    "decay": (optax.add_decayed_weights(0.1), 0),
    "rate": (optax.scale_by_schedule(optax.linear_schedule(1.0, 0.1, 3)), 0),
    "unit": (optax.scale_by_trust_ratio(), 1),
    "masked": (optax.add_decayed_weights(0.1, mask=no_bias), 1),
    "rms": (optax.clip_by_block_rms(0.2), 1),
    "norm": (optax.clip_by_global_norm(0.1), 2),
    "size": (optax.normalize_by_update_norm(), 2),
}
AROUND = {
    "nothing": lambda tx: tx,
    "several": lambda tx: promoting(optax.MultiSteps(tx, 2).gradient_transformation()),
    "masked": lambda tx: optax.masked(tx, lambda tree: jax.tree.map(lambda x: True, tree)),
    "jit": lambda tx: optax.GradientTransformation(jax.jit(tx.init), jax.jit(tx.update)),
}


@settings(max_examples=15)
@given(st.lists(st.sampled_from([*PARTS]), min_size=1, max_size=4), st.sampled_from([*AROUND]))
def test_a_chain_is_what_its_loosest_part_is(names, around):
    loosest = max(PARTS[name][1] for name in names)
    tx = AROUND[around](optax.chain(*[PARTS[name][0] for name in names]))
    reading = read(tx)
    assert reading.kind == ("element-wise", "leaf-wise", "mixing")[loosest], reading.why
    if loosest < 2:
        assert not depends_on_others(tx)
    if loosest == 0:
        assert equals_on_shards(tx)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("global norm", ("'b'", "'head'")),
        ("mask by name", ("'b'", "'head'")),
        ("lamb", ("'b'", "reduce_sum")),
        ("needs more", ("TypeError", "curvature")),
    ],
)
def test_why_names_leaves_and_operations(name, parts):
    why = read(ALL[name]).why
    assert all(part in why for part in parts), why


def test_a_mask_that_says_another_thing_of_buffers_is_seen():
    reader, tx = ProgramReader(), optax.adamw(0.1, weight_decay=0.5, mask=small)
    leaves = reader.read(tx, TREES[0])
    buffers = reader.read(tx, (DRAWN[0],))
    assert leaves.kind == buffers.kind == "element-wise"
    assert not leaves.equals_on_buffers(buffers, [0])
    assert leaves.equals_on_buffers(reader.read(tx, (DRAWN[0][:9],)), [0])


def test_a_part_of_the_leaves_is_told_from_all():
    """Noise of a leaf depends on how many there are, and nothing else of the program says so."""
    reader, structure = ProgramReader(), jax.tree.structure(TREES[0])
    some = {**TREES[0], "w": optax.MaskedNode()}
    for name, same in {"noise": False, "lamb": True, "mask by name": True}.items():
        whole = reader.read(ALL[name], TREES[0])
        part = reader.read(ALL[name], some, structure=structure)
        assert part.kind == "leaf-wise"
        assert (whole.leaves[:2] == part.leaves[:2]) == same, name
    assert part.leaves[2] == ()


def test_parameters_may_be_a_tuple_or_one_array():
    """A chain's state is a tuple, too, and a counter an array."""
    chain = optax.chain(
        optax.identity(), optax.sgd(lambda count: 0.1 / (1.0 + count.astype(jnp.float32)))
    )
    same, other = (np.ones(3), np.ones(3)), (np.ones(3), np.ones((2, 2)))
    for params in (same, other, (np.ones(3),), np.ones(3), [np.ones(2)]):
        for tx in (chain, optax.adam(0.1), ELEMENTS["nesterov"]):
            assert read(tx, params).kind == "element-wise"


def test_extra_arguments_are_followed():
    plateau, polyak = promoting(optax.contrib.reduce_on_plateau()), optax.polyak_sgd()
    assert read(plateau, extra=EXTRA).kind == "element-wise"
    assert read(polyak, extra=EXTRA).kind == "mixing"
    searches = optax.scale_by_backtracking_linesearch(3)
    assert "is computed from" in read(searches, extra=EXTRA).why


def test_programs_with_equal_keys_compute_the_same():
    reader, types = ProgramReader(), [jax.ShapeDtypeStruct((3,), "float32")] * 2

    def key(fn):
        return reader.key(jax.make_jaxpr(fn)(*types))

    def looped(step):
        return lambda x, y: lax.fori_loop(0, 3, lambda _, now: step(now, y), x)

    table = np.arange(3, dtype=np.float32)
    different = [
        lambda x, y: x + y,
        lambda x, y: x - y,
        lambda x, y: (x + y)[::-1],
        lambda x, y: x + table,
        lambda x, y: x + 2 * table,
        lambda x, y: x + 1.0,
        lambda x, y: x + 2.0,
        lambda x, y: jnp.zeros(3),
        lambda x, y: jnp.zeros(4),
        lambda x, y: jnp.zeros(3, jnp.int32),
        looped(jnp.add),
        looped(jnp.subtract),
        looped(lambda now, y: now),
        lambda x, y: lax.cond(x[0] > 0, lambda: x, lambda: y),
        lambda x, y: lax.cond(x[0] > 0, lambda: y, lambda: x),
    ]
    keys = [key(fn) for fn in different]
    assert len(set(keys)) == len(keys)
    assert key(lambda a, b: a + b) == keys[0] == key(jax.jit(different[0]))
    assert key(lambda a, b: a + np.arange(3, dtype=np.float32)) == keys[3]
    assert key(looped(lambda now, y: now + y)) == keys[10]
