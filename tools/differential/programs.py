"""Programs of steps and loops by name, as StableHLO text where jax gives it without compiling.

Each scenario returns texts by phase. Only public calls are made.
"""

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax

import jaxslowmo as js

from .checkouts import ROOT
from .problems import (
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

Texts = dict[str, str]
Scenarios = dict[str, Callable[[], Texts]]
SYNC: dict[str, Callable[[], Any]] = {
    "local_sgd": lambda: js.local_sgd("replica", sync_every=2),
    "slowmo": lambda: js.slowmo(
        "replica", base=js.local_sgd("replica", sync_every=2), sync_every=4
    ),
    "sgp": lambda: js.sgp("replica"),
    "diloco": lambda: js.diloco("replica", sync_every=2),
}


def _phases(step: Any, state: Any, batch: Any) -> Texts:
    traced = step.traced_by_phase(state, batch)
    return {phase or "all": one.lower().as_text() for phase, one in traced.items()}


def _compiled(program: Any) -> str:
    """Text of a compiled program without where its lines come from."""
    text = re.sub(r", metadata=\{[^}]*\}", "", program.as_text())
    return "\n".join(line for line in text.splitlines() if re.match(r"\s*(ROOT )?%|\w+ %", line))


def bench_step() -> Scenarios:
    """Of every step of benchmarks/bench_step.py of this checkout."""
    sys.argv = [sys.argv[0], "--width", "64"]
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import bench_step

    mesh = js.make_mesh({"replica": bench_step.ARGS.replicas})
    params = bench_step.init_mlp(64)
    batch = tuple(np.zeros((64, n), np.float32) for n in (64, 16))

    def texts(parts: dict[str, Any]) -> Texts:
        step = js.make_train_step(bench_step.loss, optax.adamw(1e-3), mesh=mesh, **parts)
        return _phases(step, step.init(params), batch)

    return {
        f"bench_step, {name}": lambda parts=parts: texts(parts)
        for name, parts in bench_step.variants().items()
    }


def _step(
    make: Callable[[], dict[str, Any]],
    *,
    mesh: str = "one level",
    optimizer: Callable[[], Any] = lambda: optax.adamw(1e-3),
    with_state: bool = False,
    use: Callable[[Any, Any, Any], Texts] = _phases,
) -> Callable[[], Texts]:
    """Texts of a step; `use` is called with it, its state and a batch."""

    def texts() -> Texts:
        function = loss_with_state if with_state else loss
        step = js.make_train_step(function, optimizer(), mesh=mesh_of(mesh), **make())
        started = {"model_state": model_state()} if with_state else {}
        return use(step, step.init(parameters(), **started), batches(1)[0])

    return texts


def _windows(step: Any, state: Any, batch: Any) -> Texts:
    """Collecting, an update with a window and one of a window."""
    window, _ = step.collect(state, batch)
    if step.mode == "host":
        return {"windowed": _compiled(step.compiled(state, batch, window=window))}

    def with_window(state: Any, batch: Any, window: Any) -> Any:
        return step(state, batch, window=window)

    def collect_more(state: Any, batch: Any, window: Any) -> Any:
        return step.collect(state, batch, window=window)

    return {
        "collect": jax.jit(step.collect).lower(state, batch).as_text(),
        "collect more": jax.jit(collect_more).lower(state, batch, window).as_text(),
        "step": jax.jit(with_window).lower(state, batch, window).as_text(),
        "apply": jax.jit(step.apply).lower(state, window).as_text(),
    }


def _weighted(step: Any, state: Any, batch: Any) -> Texts:
    weight = np.array([1.0, 0.0, 2.0, 1.0], np.float32)
    return {"all": jax.jit(step).lower(state, batch, weight).as_text()}


def steps() -> Scenarios:
    """Of steps without tables."""

    def mean() -> dict[str, Any]:
        return {"gradients": js.all_reduce_gradients("replica")}

    def clipped_mean() -> dict[str, Any]:
        clip = js.clip_by_global_norm(1.0)
        return {"gradients": joined(js.all_reduce_gradients("replica"), clip)}

    def of_sync(name: str, **more: Any) -> Callable[[], dict[str, Any]]:
        return lambda: {"sync": SYNC[name](), **more}

    def scaled(*parts: Any) -> Callable[[], Any]:
        return lambda: js.dynamic_loss_scale(joined(*[p() for p in parts], optax.adam(1e-3)))

    def clip() -> Any:
        return js.clip_by_global_norm(1.0)

    def half() -> dict[str, Any]:
        return {"policy": js.gradients.Policy("float16")}

    made: Scenarios = {
        "mean, clip": _step(clipped_mean),
        "mean in buckets": _step(
            lambda: {"gradients": js.all_reduce_gradients("replica", bucket_bytes=64)}
        ),
        "mean, value": _step(mean, optimizer=lambda: optax.polyak_sgd()),
        "mean, local_sgd, value": _step(
            lambda: {**mean(), "sync": SYNC["local_sgd"]()}, optimizer=lambda: optax.polyak_sgd()
        ),
        "skip_unused around the optimizer": _step(
            lambda: {"gradients": optax.identity()},
            optimizer=lambda: js.gradients.skip_unused(
                joined(js.all_reduce_gradients("replica"), optax.sgd(0.1)), "replica"
            ),
        ),
        "line search": _step(
            of_sync("local_sgd"),
            optimizer=lambda: optax.chain(
                optax.sgd(0.1), optax.scale_by_backtracking_linesearch(4)
            ),
        ),
        "copies of parameters": _step(
            of_sync("slowmo"), optimizer=lambda: optax.contrib.schedule_free_sgd(0.1)
        ),
        "loss scale, mean": _step(lambda: {**mean(), **half()}, optimizer=scaled()),
        "loss scale, clip, mean": _step(lambda: {**mean(), **half()}, optimizer=scaled(clip)),
        "clip in gradients": _step(clipped_mean),
        "clip, virtual": _step(
            of_sync("local_sgd"),
            optimizer=lambda: joined(clip(), optax.adam(1e-3)),
            mesh="virtual",
        ),
        "weights, mean": _step(mean, use=_weighted),
        "windows, mean": _step(mean, use=_windows),
        "windows, mean, state": _step(mean, use=_windows, with_state=True),
        "windows, loss scale": _step(
            lambda: {**mean(), **half()}, optimizer=scaled(), use=_windows
        ),
        "trained apart": _step(lambda: {"sync": "none"}),
    }
    for name in SYNC:
        for mode in ("traced", "host"):
            made[f"{name}, {mode}"] = _step(of_sync(name, mode=mode))
            made[f"{name}, {mode}, two levels"] = _step(of_sync(name, mode=mode), mesh="two levels")
            made[f"{name}, {mode}, loss scale, clip"] = _step(
                lambda name=name, mode=mode: {**of_sync(name, mode=mode)(), **half()},
                optimizer=scaled(clip),
            )
        made[f"{name}, weights"] = _step(of_sync(name), use=_weighted)
        made[f"{name}, accumulate"] = _step(of_sync(name, accumulate=2), with_state=True)
        made[f"{name}, windows"] = _step(of_sync(name), use=_windows)
    made["local_sgd, windows, host"] = _step(of_sync("local_sgd", mode="host"), use=_windows)
    for kind in ("sync_mean", "broadcast", "local"):
        made[f"local_sgd, model_state {kind}"] = _step(
            of_sync("local_sgd", model_state=kind), with_state=True
        )
        made[f"mean, model_state {kind}, two levels"] = _step(
            lambda kind=kind: {
                "gradients": js.all_reduce_gradients(("replica", "device")),
                "model_state": kind,
            },
            with_state=True,
            mesh="two levels",
        )
    return made


def _table_step(mesh: str, make: Callable[[], dict[str, Any]], use: Any = _phases) -> Any:
    def texts() -> Texts:
        step = js.make_train_step(
            table_loss, optax.sgd(0.3), mesh=mesh_of(mesh), embeddings=tables(), **make()
        )
        return use(step, step.init(table_parameters()), table_batches(1)[0])

    return texts


def _ahead(mode: str) -> Callable[[Any, Any, Any], Texts]:
    def texts(step: Any, state: Any, batch: Any) -> Texts:
        ahead = step.ahead(mode)
        asked = ahead.prime(state, batch)
        return {"all": _compiled(ahead.compiled(state, batch, asked, batch))}

    return texts


def table_steps() -> Scenarios:
    """Of steps with tables."""
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "mean": lambda: {"gradients": js.all_reduce_gradients("replica")},
        "local_sgd": lambda: {"sync": SYNC["local_sgd"]()},
        "local_sgd, host": lambda: {"sync": SYNC["local_sgd"](), "mode": "host"},
        "slowmo": lambda: {"sync": SYNC["slowmo"]()},
        "mean, accumulate": lambda: {
            "gradients": js.all_reduce_gradients("replica"),
            "accumulate": 2,
        },
    }
    made: Scenarios = {}
    for name, make in parts.items():
        for mesh in ("one shard", "shards"):
            made[f"tables, {name}, {mesh}"] = _table_step(mesh, make)
    for mode in ("exact", "stale", "patched"):
        made[f"tables, local_sgd, ahead {mode}"] = _table_step(
            "shards", parts["local_sgd"], _ahead(mode)
        )
    made["tables, mean, windows"] = _table_step("shards", parts["mean"], _windows)
    return made


def stages() -> Scenarios:
    """Of steps whose loss is a pipeline in one program."""

    def layer(params: Any, x: Any) -> Any:
        return x + jax.numpy.tanh(x @ params["w"])

    def mean_square(out: Any, batch: Any) -> Any:
        return jax.numpy.mean((out - batch) ** 2)

    def texts(kind: str, sync: str) -> Texts:
        first = lambda params, batch: layer(params, batch)  # noqa: E731
        model = js.LayeredModel([first, layer, layer, layer], mean_square)
        layers = [{"w": np.full((8, 8), 0.01 * (i + 1), np.float32)} for i in range(4)]
        mesh = js.make_mesh({"replica": 2, "stage": 2})
        schedule = js.schedules.by_name(kind, 2, 4, None)
        pipe = js.pipelined(
            model, layers, schedule, parts=js.partition_uniform(4, num_stages=2), mesh=mesh
        )
        optimizer = joined(js.clip_by_global_norm(0.1), optax.sgd(0.1))
        step = js.make_train_step(pipe, optimizer, sync=SYNC[sync](), mesh=mesh)
        state = step.init(pipe.layout.stack(layers))
        return _phases(step, state, np.zeros((16, 8), np.float32))

    return {
        f"stages, {kind}, {sync}": lambda kind=kind, sync=sync: texts(kind, sync)
        for kind, sync in (("gpipe", "local_sgd"), ("one_f_one_b", "slowmo"))
    }


def loops() -> Scenarios:
    """Of loops under shard_map: one update of each transform of tests/support/transforms.py."""
    from support.transforms import TRANSFORMS, stacked

    def texts(make: Callable[[], Any]) -> Texts:
        tx = make()
        sgd = optax.sgd(0.1, momentum=0.9)
        parts = (sgd, tx) if isinstance(tx, js.ParameterTransform) else (tx, sgd)
        chain = optax.chain(*parts)
        params = stacked()
        spec = jax.sharding.PartitionSpec("replica")

        def per_device(params: Any, grads: Any) -> Any:
            params, grads = jax.tree.map(lambda x: x[0], (params, grads))
            updates, _ = chain.update(grads, chain.init(params), params)
            return jax.tree.map(lambda x: x[None], updates)

        by_check: Texts = {}
        for checked in (True, False):
            mapped = jax.shard_map(
                per_device,
                mesh=js.make_mesh({"replica": 4}),
                in_specs=(spec, spec),
                out_specs=spec,
                check_vma=checked,
            )
            name = "checked" if checked else "unchecked"
            by_check[name] = jax.jit(mapped).lower(params, params).as_text()
        return by_check

    return {f"loop, {name}": lambda make=make: texts(make) for name, make in TRANSFORMS.items()}


def scenarios() -> Iterator[tuple[str, Callable[[], Texts]]]:
    """All of them, by name."""
    for group in (bench_step, steps, table_steps, stages, loops):
        yield from group().items()
