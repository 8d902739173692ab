"""What the compiled program of a pipeline says of itself."""

from typing import Any

import jax

from ...._support.types import PyTree
from ....pipeline import Pipelined
from ...communication import comm_report_of
from ._report import CompiledPipeline


def compiled_figures(pipe: Pipelined, batch: PyTree) -> CompiledPipeline:
    """Of the program of loss and gradients, or of the loss of a forward-only schedule."""
    stacked = pipe.layout.types
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    more: dict[str, Any] = {}
    if pipe.model.takes_key:
        more["rng"] = jax.eval_shape(lambda: jax.random.key(0))
    if pipe.state_layout is not None:
        more["model_state"] = pipe.state_layout.types

    def loss(stacked: PyTree, batch: PyTree, more: dict[str, Any]) -> Any:
        return pipe.loss_fn(stacked, batch, **more)

    program: Any = loss
    if not pipe.schedule.forward_only:
        has_aux = isinstance(jax.eval_shape(loss, stacked, types, more), tuple)
        program = jax.value_and_grad(loss, has_aux=has_aux)
    compiled = jax.jit(program).lower(stacked, types, more).compile()
    report = comm_report_of(compiled, mesh=pipe.mesh)
    rows = report.select(collective="collective-permute")
    memory: Any = compiled.memory_analysis()
    return CompiledPipeline(
        temp_bytes=int(memory.temp_size_in_bytes),
        permutes=sum(row.count for row in rows),
        permuted_bytes=sum(row.bytes for row in rows),
        trip_counts=tuple(sorted({row.trip_count for row in rows}, key=str)),
    )
