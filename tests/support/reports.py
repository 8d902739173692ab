"""A training step with leaves of two dtypes, and reports of what it sends."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

import jaxslowmo as js

PARAMS = {
    "embedding": jax.ShapeDtypeStruct((96, 64), jnp.float32),
    "kernel": jax.ShapeDtypeStruct((64, 33), jnp.float32),
    "bias": jax.ShapeDtypeStruct((33,), jnp.float32),
    "half": jax.ShapeDtypeStruct((31,), jnp.bfloat16),
    "scale": jax.ShapeDtypeStruct((), jnp.float32),
}
FLOAT32_BYTES = 4 * (96 * 64 + 64 * 33 + 33 + 1)
HALF_BYTES = 2 * 31
SLOW_BYTES = FLOAT32_BYTES + 4 * 31  # the slow exchange is float32
BATCH = jax.ShapeDtypeStruct((16, 4), jnp.float32)


def loss(params, batch):
    hidden = params["embedding"][:4].T @ jnp.eye(4) @ batch.T
    out = params["kernel"].T @ hidden + params["bias"][:, None]
    return jnp.mean(out * params["scale"]) + jnp.sum(params["half"].astype(jnp.float32))


def report(mesh, mode="traced", **parts) -> js.reports.CommReport:
    """Return the report of the lowered programs; compiling them would take most of the time."""
    step = js.make_train_step(loss, optax.adam(1e-3), mesh=mesh, mode=mode, **parts)
    traced = step.traced_by_phase(jax.eval_shape(step.init, PARAMS), BATCH)
    lowered = {kind: program.lower() for kind, program in traced.items()}
    return js.comm_report_of(lowered.get(None, lowered), compile=False)


def merged(rows) -> list[js.reports.CommRow]:
    """Return the rows without their contents: a collective with its padding is one."""
    whole = {}
    for row in rows:
        key = dataclasses.replace(row, content="", count=0, bytes=0, wire_bytes=0)
        whole.setdefault(key, []).append(row)
    names = "count", "bytes", "wire_bytes"
    return [
        dataclasses.replace(key, **{name: sum(getattr(x, name) for x in same) for name in names})
        for key, same in whole.items()
    ]


def rows(
    report: js.reports.CommReport, kind: str, axis: str = "replica"
) -> set[tuple[str, int, int]]:
    """Return (collective, count, bytes) of all emitted collectives over the axis."""
    return {
        (r.collective, r.count, r.bytes)
        for r in merged(report.select(axis=axis, kind=kind, level="emitted"))
    }
