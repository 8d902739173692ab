"""A stage whose backward pass is whole is the stage whose backward pass is split, put together."""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js
from jaxslowmo.pipeline.stage import split_stage, whole_stage

PACKAGE = Path(js.__file__).parent
WIDTH = 4


def draw(*shape: int) -> jax.Array:
    return jnp.float32(np.random.default_rng(sum(shape)).normal(size=shape))


def dense(weights: Any, x: Any, microbatch: Any) -> Any:
    return {"x": jnp.tanh(x["x"] @ weights["w"]), "place": x["place"] + microbatch["shift"]}


def loss(weights: Any, x: Any, microbatch: Any) -> Any:
    y = jnp.tanh(x["x"] @ weights["w"]) * (x["place"] % 3)[:, None]
    return jnp.mean((y - microbatch["y"]) ** 2), {"largest": jnp.max(y)}


def looped(weights: Any, x: Any, microbatch: Any) -> Any:
    """Equal layers in a loop, which casts its weights."""
    del microbatch

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ w.astype(jnp.bfloat16)), None

    return {"x": jax.lax.scan(layer, x["x"].astype(jnp.bfloat16), weights["w"])[0]}


X = {"x": draw(8, WIDTH), "place": jnp.arange(8)}
MICROBATCH = {"shift": jnp.int32(2), "y": draw(8, WIDTH)}
STAGES = {
    "dense": (dense, {"w": draw(WIDTH, WIDTH)}, False),
    "loss": (loss, {"w": draw(WIDTH, WIDTH)}, True),
    "loop": (looped, {"w": draw(6, WIDTH, WIDTH)}, False),
}


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("name", list(STAGES))
def test_both_passes_are_those_of_a_split_stage(name: str, remat: bool) -> None:
    fn, weights, is_loss = STAGES[name]
    options = {"loss": is_loss, "remat": remat}
    whole = whole_stage(fn, weights, X, MICROBATCH, **options)
    split = split_stage(fn, weights, X, MICROBATCH, **options)
    assert (whole.y, whole.stash, whole.reads) == (split.y, split.stash, split.reads)
    assert whole.kept == ()
    results = []
    for stage in (whole, split):
        y, stash = stage.forward(weights, X, MICROBATCH)
        dy = 1.0 if is_loss else {**dict.fromkeys(y), "x": jnp.ones_like(y["x"])}
        results.append((y, stage.backward(weights, MICROBATCH, stash, dy)))
    jax.tree.map(np.testing.assert_array_equal, *results)
    assert not any(x.shape == weights["w"].shape for x in whole.stash)


def files_of(run: Any) -> set[str]:
    files: set[str] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(str(PACKAGE)) and "/pipeline/" in path:
            files.add(str(Path(path).relative_to(PACKAGE / "pipeline")))

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return files


def test_what_does_not_split_enters_no_file_of_split() -> None:
    def run(name: str) -> None:
        fn, weights, is_loss = STAGES[name]
        stage = whole_stage(fn, weights, X, MICROBATCH, loss=is_loss)
        y, stash = stage.forward(weights, X, MICROBATCH)
        stage.backward(weights, MICROBATCH, stash, 1.0 if is_loss else dict.fromkeys(y))

    few = {"stage/_flat.py", "stage/_program.py"}
    assert files_of(lambda: run("loss")) == few
    assert files_of(lambda: run("loop")) == {*few, "stage/_loops.py"}
