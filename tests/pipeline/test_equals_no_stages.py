"""Steps of random small models with stages equal those without, whatever stands beside."""

from typing import Any, NamedTuple

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.layered import assert_close
from support.optimizers import per_leaf

WIDTH, STEPS, TWO_CHUNKS = 4, 5, ("interleaved", "zbv")


def embed(params, batch):
    x = params["table"][batch["tokens"]] * batch["scale"] + batch["shift"]
    return {"x": x, "place": batch["places"]}


def dense(params, x):
    y = x["x"] @ params["kernel"]
    if "bias" in params:
        y += params["bias"][None]
    return {**x, "x": x["x"] + jnp.tanh(y)}


def gated(params, x):
    """With a leaf of another rank, and one of no dimension."""
    y = jnp.einsum("nd,hde->nhe", x["x"], params["heads"]).sum(1)
    return {**x, "x": x["x"] + params["scale"] * y}


def by_place(params, x):
    """Integers travel beside activations, and are read."""
    return {**x, "x": x["x"] * params["scales"][x["place"] % 3]}


def plain(params, x):
    return {**x, "x": x["x"] * 0.9}


def head(params, x):
    return x["x"] @ params["table"].T


def mean_loss(logits, batch):
    own = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["next"][:, None], 1)[:, 0]
    return -jnp.mean(own), {"largest": jnp.mean(jnp.max(logits, -1))}


def masked_loss(logits, batch):
    own = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["next"][:, None], 1)[:, 0]
    return (-jnp.sum(own * batch["mask"]), jnp.sum(batch["mask"]))


SHAPES: dict[Any, dict[str, tuple[int, ...]]] = {
    dense: {"kernel": (WIDTH, WIDTH), "bias": (WIDTH,)},
    gated: {"heads": (2, WIDTH, WIDTH), "scale": ()},
    by_place: {"scales": (3, WIDTH)},
    plain: {},
}


class Case(NamedTuple):
    """What is trained, and how.

    Attributes:
      blocks: the layers between embedding and head.
      sizes: of the mesh.
      kind: of the schedule.
      optimizer: its name.
      sync: "local_sgd", "slowmo" or "gradients".
      executor: "one_program" or "host".
      mode: of the step.
      accumulate: batches per update.
      is_tied: whether embedding and head share their table.
      is_masked: whether the loss is a quotient of sums.
      remat: whether forward passes are computed again.
      clips: whether all gradients are clipped by their norm.
      pauses: whether the last replica has no batch in every other step.
    """

    blocks: list[Any]
    sizes: dict[str, int]
    kind: str
    optimizer: str
    sync: str
    executor: str
    mode: str
    accumulate: int
    is_tied: bool
    is_masked: bool
    remat: bool
    clips: bool
    pauses: bool


@st.composite
def cases(draw):
    kind = draw(st.sampled_from(list(js.schedules.KINDS)))
    chunks = 2 if kind in TWO_CHUNKS else 1
    stages = draw(st.sampled_from([1, 2, 4]))
    inner = draw(st.sampled_from([{}, {"fsdp": 2}] if stages < 4 else [{}]))
    runs = draw(st.lists(st.tuples(st.sampled_from(list(SHAPES)), st.integers(1, 5)), max_size=4))
    blocks = [layer for layer, count in runs for _ in range(count)]
    blocks += [dense] * max(0, stages * chunks - len(blocks) - 2)
    optimizers = sorted(per_leaf([{}]))
    return Case(
        blocks,
        {"replica": draw(st.sampled_from([1, 2])), "stage": stages, **inner},
        kind,
        draw(st.sampled_from(optimizers)),
        draw(st.sampled_from(["local_sgd", "slowmo", "gradients", "reset", "average"])),
        draw(st.sampled_from(["one_program", "host"])),
        draw(st.sampled_from(["traced", "host"])),
        draw(st.sampled_from([1, 2])),
        *(draw(st.booleans()) for _ in range(5)),
    )


def model_of(case):
    random = np.random.default_rng(5).normal
    table = {"table": (8, WIDTH)}
    shapes = [table, *(SHAPES[layer] for layer in case.blocks), table]
    params = [{n: np.float32(random(size=shape) / 3) for n, shape in own.items()} for own in shapes]
    tied = [((0, "table"), (len(params) - 1, "table"))] if case.is_tied else []
    if case.is_tied:
        params[-1]["table"] = params[0]["table"]
    loss = masked_loss if case.is_masked else mean_loss
    return js.LayeredModel([embed, *case.blocks, head], loss, tied=tied), params


def batches(case):
    examples = 16 * case.accumulate * case.sizes["replica"]
    for seed in range(STEPS):
        drawn = np.random.default_rng(seed).integers(0, 8, (3, examples)).astype(np.int32)
        # Of parts of equal weight: a mean over parts is then one over examples.
        mask = (np.arange(examples) % 4 < 2).astype(np.float32) * 2
        # Those of all examples.
        shared = {"scale": 1 + seed / 8, "shift": np.full((1, WIDTH), seed / 8, np.float32)}
        # Of these forward passes alone read `places`.
        split = {"tokens": drawn[0], "next": drawn[1], "places": drawn[2], "mask": mask}
        yield {**split, **shared}


def trained(case, loss_fn, params, mesh, counted=None):
    base = js.local_sgd("replica", sync_every=2)
    sync = {
        "local_sgd": base,
        "slowmo": js.slowmo("replica", base=base, sync_every=4),
        "reset": js.diloco("replica", sync_every=2, inner_state="reset"),
        "average": js.local_sgd("replica", sync_every=2, inner_state="average"),
        "gradients": None,
    }[case.sync]
    gradients = js.all_reduce_gradients("replica") if sync is None else None
    optimizer = per_leaf(params)[case.optimizer]
    if case.clips:
        optimizer = js.chain(js.clip_by_global_norm(0.5, counted=counted), optimizer)
    step = js.make_train_step(
        loss_fn,
        optimizer,
        sync=sync,
        gradients=gradients,
        mesh=mesh,
        mode=case.mode,
        accumulate=case.accumulate,
    )
    state = step.init(params)
    for t, batch in enumerate(batches(case)):
        weight = np.ones(case.sizes["replica"], np.float32)
        weight[-1] = t % 2
        pauses = case.pauses and len(weight) > 1
        state, metrics = step(state, batch, weight if pauses else None)
    return state, metrics


def spec_of(x):
    return P("fsdp") if x.ndim > 1 and x.shape[0] % 2 == 0 else P()


def check(case):
    model, params = model_of(case)
    sizes = case.sizes
    chunks = 2 if case.kind in TWO_CHUNKS else None
    schedule = js.schedules.by_name(case.kind, sizes["stage"], 4, chunks)
    mesh = js.make_mesh(sizes)
    specs = [{n: spec_of(x) for n, x in own.items()} for own in params] if "fsdp" in sizes else None
    pipe = js.pipelined(
        model,
        params,
        schedule,
        mesh=mesh,
        executor=case.executor,
        remat=case.remat,
        data_axes=("fsdp",) if specs else (),
        param_specs=specs,
    )
    once = None
    if case.is_tied:
        once = [*[None] * (len(params) - 1), {"table": np.zeros((8, WIDTH))}]
    alone = js.virtual_mesh({"replica": sizes["replica"]})
    found, metrics = trained(case, pipe, params, mesh)
    known, expected = trained(case, model, params, alone, counted=once)
    assert_close(metrics, expected)
    assert_close(pipe.layout.unstack_like(found.params), known.params)
    # Where a stage has fewer leaves than another, zeros stay zeros.
    for name, held in pipe.layout.stack(jax.tree.map(np.ones_like, params)).items():
        assert not np.asarray(found.params[name])[:, np.asarray(held) == 0].any()


TWO = {"replica": 2, "stage": 2}
IN_PARTS = {**TWO, "fsdp": 2}
ONE_PROGRAM, HOST = "one_program", "host"
# Each value once, and the pairs that interact; the random cases have the rest.
CHOSEN = {
    "tied, clipped, in parts": Case(
        [dense, plain, gated], IN_PARTS, "zbv", "mask_by_name", "slowmo", ONE_PROGRAM, "traced",
        2, True, False, False, True, False,
    ),
    "masked, four stages, pauses": Case(
        [gated, plain, dense, dense], {"replica": 2, "stage": 4}, "one_f_one_b", "adamw",
        "gradients", HOST, "host", 1, False, True, True, False, True,
    ),
    "tied and masked, clipped, chunks": Case(
        [by_place, dense, dense], IN_PARTS, "interleaved", "sgd", "local_sgd", HOST, "traced",
        2, True, True, False, True, False,
    ),
    "loops, found table, pauses": Case(
        [dense] * 5, TWO, "lockstep", "inject_hyperparams", "gradients", ONE_PROGRAM, "host",
        1, False, True, True, True, True,
    ),
    "tied, moments that are averaged, pauses": Case(
        [gated, dense], TWO, "gpipe", "adamw", "average", HOST, "host",
        1, True, False, False, False, True,
    ),
    "in parts, moments that are reset": Case(
        [dense, dense], IN_PARTS, "one_f_one_b", "mask_by_name", "reset", ONE_PROGRAM, "traced",
        1, False, False, False, True, False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOSEN)
def test_chosen_models(name):
    check(CHOSEN[name])


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*axis 'replica' has size 1")
@settings(max_examples=25)
@given(cases())
def test_random_models(case):
    check(case)
