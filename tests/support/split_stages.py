"""The operations of a stage, compiled separately, for comparison with `jax.vjp`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxslowmo.pipeline import StageProgram, split_stage


class Compiled(NamedTuple):
    """The operations of a stage on one microbatch, and the whole backward pass of `jax.vjp`."""

    program: StageProgram
    y: Any
    gradients: tuple[Any, Any]  # of x and weights, from B and W
    expected: tuple[Any, Any]
    flops: dict[str, float]


def compiled_stage(
    fn: Any, weights: Any, x: Any, microbatch: Any, *, remat: bool = False
) -> Compiled:
    """Compile and run F, B and W separately; return their results and FLOPs."""
    program = split_stage(fn, weights, x, microbatch, remat=remat)
    flops: dict[str, float] = {}

    def call(name: str, f: Any, *args: Any) -> Any:
        executable = jax.jit(f).lower(*args).compile()
        flops[name] = executable.cost_analysis().get("flops", 0)
        return executable(*args)

    y, stash = call("F", program.forward, weights, x, microbatch)
    dy = jax.tree.map(lambda v: jnp.cos(jnp.arange(v.size, dtype=v.dtype)).reshape(v.shape), y)
    dx, kept = call("B", program.backward_input, weights, microbatch, stash, dy)
    dw = call("W", program.backward_weight, weights, microbatch, stash, kept)
    _, vjp = jax.jit(lambda w, v: jax.vjp(lambda w, v: fn(w, v, microbatch), w, v))(weights, x)
    expected = call("vjp", vjp, dy)
    call("BW", program.backward, weights, microbatch, stash, dy)
    return Compiled(program, y, (dx, dw), expected[::-1], flops)


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Raise unless the trees are equal up to rounding."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1, np.abs(b).max()))
