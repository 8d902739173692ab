"""Runs a drawn scenario and returns the arrays that it ends with, by name of spelling and leaf."""

import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxslowmo as js

from .drawing import KEEP_COPIES, WRONG, Options
from .parts import gradients_of, optimizer_of, sync_of, weights
from .problems import (
    HAS_SPECS,
    MESHES,
    batches,
    joined,
    loss,
    loss_with_state,
    mesh_of,
    model_state,
    parameters,
    table_batches,
    table_loss,
    table_parameters,
    tables,
)

Arrays = dict[str, np.ndarray]


def named(**trees: Any) -> Arrays:
    """Every leaf as an array of NumPy under its tree's name and its path."""

    def plain(x: Any) -> np.ndarray:
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        return np.asarray(x)

    return {
        f"{name}/{jax.tree_util.keystr(path)}": plain(leaf)
        for name, tree in trees.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def make_step(options: Options, spelling: str = "parts by name", **changed: Any) -> Any:
    """The training step; `changed` are other arguments."""
    mesh = js.make_mesh({"replica": 2}) if options.get("replicas") else mesh_of(options["mesh"])
    has_tables = "table" in options
    gradients, sync = gradients_of(options), sync_of(options)
    optimizer = optimizer_of(options)
    arguments: dict[str, Any] = {
        "mesh": mesh,
        "mode": options["mode"],
        "accumulate": options["accumulate"],
    }
    if options["policy"]:
        arguments["policy"] = js.gradients.Policy(options["policy"])
    if options["model_state"]:
        arguments["model_state"] = options["model_state"]
    if has_tables:
        arguments["embeddings"] = tables(options["table"], options["rows"])
    if spelling == "parts by name":
        arguments["sync"] = sync
        if len(gradients) == 1:
            arguments["gradients"] = gradients[0]
        elif gradients:
            arguments["gradients"] = joined(*gradients)
    else:
        chain = js.chain if spelling == "js.chain" else optax.chain
        optimizer = chain(*gradients, optimizer, *([] if sync is None else [sync]))
        if spelling == "optax.chain" and options["gradients"]:
            arguments["gradients"] = optax.identity()
    function = table_loss if has_tables else loss_with_state if options["model_state"] else loss
    return js.make_train_step(function, optimizer, **(arguments | changed))


def _started(options: Options, make: Any) -> tuple[Any, dict[str, Any]]:
    """What `make(params, model_state=)` returns, such as `step.init`."""
    if "table" in options:
        return make(table_parameters())
    state = {"model_state": model_state()} if options["model_state"] else {}
    return make(parameters(options["dtypes"]), **state)


def _batches(options: Options, count: int) -> list[Any]:
    return (table_batches if "table" in options else batches)(count)


def _trained(step: Any, state: Any, options: Options, updates: range) -> tuple[Any, list[Any]]:
    """After these updates, with what each of them measured."""
    replicas = step.mesh.shape["replica"]
    all_batches = iter(_batches(options, 3 * updates.stop)[3 * updates.start :])
    all_metrics = []
    for update in updates:
        weight = weights(options, replicas, update)
        if options["windows"]:
            window, first = step.collect(state, next(all_batches), weight)
            all_metrics.append(first)
        if options["windows"] == "apply":
            window, first = step.collect(state, next(all_batches), weight, window=window)
            state, metrics = step.apply(state, window)
        elif options["windows"] == "step":
            state, metrics = step(state, next(all_batches), weight, window=window)
        else:
            state, metrics = step(state, next(all_batches), weight)
        all_metrics.append(metrics)
    return state, jax.device_get(all_metrics)


def _trained_ahead(step: Any, state: Any, options: Options) -> tuple[Any, list[Any]]:
    ahead, all_metrics = step.ahead(options["ahead"]), []
    all_batches = _batches(options, options["updates"])
    asked = ahead.prime(state, all_batches[0])
    for update, (batch, after) in enumerate(itertools.zip_longest(all_batches, all_batches[1:])):
        weight = weights(options, step.mesh.shape["replica"], update)
        state, metrics, asked = ahead(state, batch, asked, after, weight)
        all_metrics.append(metrics)
    return state, jax.device_get(all_metrics)


def _fields(state: Any, metrics: Any) -> Arrays:
    return named(
        params=state.params,
        opt_state=state.opt_state,
        model_state=state.model_state,
        counters=(state.step, state.rng),
        metrics=metrics,
    )


def run_step(options: Options, spelling: str) -> Arrays:
    """Trains with `js.make_train_step`."""
    step = make_step(options, spelling)
    state = _started(options, step.init)
    if options.get("ahead"):
        return _fields(*_trained_ahead(step, state, options))
    return _fields(*_trained(step, state, options, range(options["updates"])))


def run_restore(options: Options, spelling: str, folder: Path) -> Arrays:
    """Saves where nothing is saved yet, restores, maybe on other replicas, and trains on."""
    from jaxslowmo.checkpoint import Checkpoints

    saved_at = options["saved_at"]
    if not folder.exists():
        step = make_step({**options, "replicas": None})
        state, _ = _trained(step, _started(options, step.init), options, range(saved_at))
        with Checkpoints(folder) as checkpoints:
            checkpoints.save(saved_at, state)
    step = make_step(options, spelling)

    def restored(params: Any, **kept: Any) -> Any:
        return Checkpoints(folder).restore(step, params, **kept)

    state = _started(options, restored).state
    updates = range(saved_at, saved_at + options["updates"])
    return _fields(*_trained(step, state, options, updates))


def run_misuse(options: Options, spelling: str) -> Arrays:
    """Makes a step with one wrong argument."""
    del spelling
    wrong = options["wrong"]
    make_step(options, **{wrong: WRONG[wrong]})
    return {}


def _chain(options: Options, spelling: str) -> Any:
    """The chain of a loop of one's own."""
    optimizer = optimizer_of({**options, "clip": None if options["scale"] else options["clip"]})
    sync = sync_of(options)
    chain = js.chain if spelling == "js.chain" else optax.chain
    inner = [*gradients_of(options), optimizer]
    if options["around"] == "skip_unused":
        inner = [js.gradients.skip_unused(chain(*inner), "replica")]
    elif options["around"] == "accumulate":
        inner = [js.gradients.accumulate(chain(*inner), every=2)]
    return chain(*inner, *([] if sync is None else [sync]))


def run_loop(options: Options, spelling: str) -> Arrays:
    """Trains under shard_map or vmap without `js.make_train_step`."""
    tx, mesh = _chain(options, spelling), js.make_mesh(MESHES[options["mesh"]])
    sync = sync_of(options)
    sync = sync if sync is None else sync.bound(dict(mesh.shape))
    replicas, axes = mesh.shape["replica"], tuple(mesh.shape)

    def update(phase: Any, params: Any, state: Any, batch: Any, weight: Any, talk: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        if options["scale"]:
            scale = js.loss_scale_of(state)
            grads = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
        extra: dict[str, Any] = {} if sync is None else {"phase": phase, "communicate": talk}
        if weight is not None:
            extra["weight"] = weight
        if options["optimizer"] in ("polyak", "plateau"):
            extra["value"] = value
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state, value

    def whole(phase: Any) -> Any:
        of_one = lambda *args: update(phase, *args)  # noqa: E731
        if options["execution"] == "vmap":
            return jax.jit(jax.vmap(of_one, axis_name="replica", axis_size=replicas))

        def per_device(params: Any, state: Any, batch: Any, weight: Any, talk: Any) -> Any:
            params, state, weight, talk = jax.tree.map(
                lambda x: x[0], (params, state, weight, talk)
            )
            batch = jax.tree.map(lambda x: x.reshape(x.shape[len(axes) :]), batch)
            return jax.tree.map(lambda x: x[None], of_one(params, state, batch, weight, talk))

        spec = jax.P("replica")
        mapped = jax.shard_map(
            per_device,
            mesh=mesh,
            in_specs=(spec, spec, jax.P(*axes), spec, spec),
            out_specs=spec,
            check_vma=False,
        )
        return jax.jit(mapped)

    params = js.replicate(parameters(options["dtypes"]), mesh=mesh)
    if options["execution"] == "vmap":
        params = jax.device_get(params)
        state = jax.vmap(tx.init, axis_name="replica")(params)
    else:
        state = js.init(tx, params, mesh=mesh, axis_name="replica")
    programs: dict[Any, Any] = {}
    metrics = []
    for t, batch in enumerate(batches(options["updates"]), 1):
        phase = sync.phase(t) if sync is not None and options["mode"] == "host" else None
        if phase not in programs:
            programs[phase] = whole(phase)
        split = jax.tree.map(lambda x: x.reshape(*mesh.shape.values(), -1, *x.shape[1:]), batch)
        # With a static phase what is due takes place.
        talk = np.full(replicas, not (options["pause"] and phase is None and t % 4 == 0))
        params, state, value = programs[phase](
            params, state, split, weights(options, replicas, t), talk
        )
        metrics.append(value)
    return named(params=params, opt_state=state, metrics=metrics)


def spellings(name: str, options: Options) -> list[str]:
    """How a scenario is written: the first is the one that is compared between checkouts.

    Every second one is written with `js.chain`, too, where this takes any transforms. In loops of
    one's own only `js.chain` moves the copies of parameters that some optimizers keep.
    """
    kind, _, seed = name.partition(" ")
    first = "optax.chain" if kind in ("loop", "opaque") else "parts by name"
    moves = kind == "loop" and options["sync"] and options["optimizer"] in KEEP_COPIES
    if not HAS_SPECS or kind in ("opaque", "misuse") or moves or int(seed) % 2:
        return [first]
    return [first, "js.chain"]


def run(name: str, options: Options, spelling: str, folder: Path) -> Arrays:
    """The scenario of a name such as "loop 3"; restores keep their checkpoint in `folder`."""
    kind = name.split()[0]
    if kind == "loop":
        return run_loop(options, spelling)
    if kind == "restore":
        return run_restore(options, spelling, folder / name.replace(" ", "-"))
    return {"misuse": run_misuse}.get(kind, run_step)(options, spelling)
