"""Steps of small models with stages equal those without, whatever stands beside.

Each run draws a value of every option, and each value is in one of them.
"""

import itertools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.exhaustive import covering, sweep
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


OPTIONS: dict[str, list[Any]] = {
    "blocks": [
        [dense, plain, gated],
        [gated, plain, dense, dense],
        [by_place] * 2,
        [dense] * 5,
        [plain] * 6,
    ],
    "replicas": [2, 1, 2],
    "stages": [2, 4, 2, 1],
    "in_parts": [False, True],
    "kind": list(js.schedules.KINDS),
    "optimizer": ["mask_by_name", "adamw", "sgd", "inject_hyperparams", "partition"],
    "sync": ["slowmo", "gradients", "local_sgd", "average", "reset"],
    "executor": ["one_program", "host"],
    "mode": ["traced", "host"],
    "accumulate": [1, 2],
    **{x: [True, False] for x in ("is_tied", "is_masked", "remat", "clips", "pauses", "window")},
}
RUNS = 6


def possible(case):
    """Return the case with axes of eight devices, and so many layers that each stage has one."""
    if case["optimizer"] == "partition" and case["sync"] in ("average", "reset"):
        case["optimizer"] = "adamw"  # the factors of the other are no moments
    chunks = 2 if case["kind"] in TWO_CHUNKS else 1
    missing = case["stages"] * chunks - len(case["blocks"]) - 2
    sizes = {"replica": case["replicas"], "stage": case["stages"]}
    if case["in_parts"] and case["stages"] < 4:
        sizes["fsdp"] = 2
    blocks = case["blocks"] + [dense] * max(0, missing)
    return SimpleNamespace(**case | {"blocks": blocks, "sizes": sizes})


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
        # The loss is the quotient of the whole batch, whatever its parts weigh.
        mask = (np.random.default_rng(seed).random(examples) < 0.4).astype(np.float32)
        mask[::16] = 1
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
    axes = tuple(name for name in ("replica", "fsdp") if name in mesh.shape)
    gradients = js.all_reduce_gradients(axes) if sync is None else None
    optimizer = per_leaf()[case.optimizer]
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
        weight = weight if case.pauses and len(weight) > 1 else None
        window = None
        if case.window and t == STEPS - 1:
            window, _ = step.collect(state, batch, weight)
        state, metrics = step(state, batch, weight, window=window)
    return state, metrics


def spec_of(x):
    return P("fsdp") if x.ndim > 1 and x.shape[0] % 2 == 0 else P()


def check(case):
    model, params = model_of(case)
    sizes = case.sizes
    chunks = 2 if case.kind in TWO_CHUNKS else None
    schedule = js.schedules.by_name(case.kind, sizes["stage"], 4, chunks)
    mesh = js.make_mesh(sizes)
    specs = None  # where the step averages over "fsdp", too, parameters are whole
    if "fsdp" in sizes and case.sync != "gradients":
        specs = [{n: spec_of(x) for n, x in own.items()} for own in params]
    pipe = js.pipelined(
        model,
        params,
        schedule,
        mesh=mesh,
        executor=case.executor,
        remat=case.remat,
        data_axes=("fsdp",) if "fsdp" in sizes else (),
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
    # Where a stage has fewer leaves than another, zeros stay zeros; one stage fills each buffer.
    for name, x in pipe.layout.stack(jax.tree.map(np.ones_like, params)).items():
        held = np.asarray(x)
        assert not np.asarray(found.params[name])[:, held == 0].any()
        assert held.reshape(sizes["stage"], -1).all(1).any()


CASES = sweep(itertools.product(range(4), range(RUNS)), lambda seed, _: seed == 0)


@pytest.mark.filterwarnings("ignore:.*has size 1")
@pytest.mark.parametrize(("seed", "number"), CASES)
def test_steps_with_stages_are_those_without(seed, number):
    check(possible(covering(OPTIONS, RUNS, seed)[number]))
