"""Several processes: trees that differ are named on all of them, and equal ones train."""

import ast
import contextlib
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from jaxslowmo.mesh._replicas import describe, differences, digest
from support.exhaustive import sweep
from support.pairs import two_processes as of_two_processes
from support.waiting import PATIENCE_SECONDS

SECONDS = PATIENCE_SECONDS


def test_a_tree_is_described_by_name_dtype_and_shape():
    tree = {"b": np.ones((2, 3), np.float32), "a": {"n": np.ones((), np.int32)}, "a/n": 1.0}
    assert describe(tree) == [
        ("a/n", "int32[]"),
        ("a/n (no. 2)", "float32[]"),
        ("b", "float32[2,3]"),
    ]


def test_equal_trees_do_not_differ():
    assert differences([[("a", "float32[2]"), ("b", "int32[]")]] * 3) == []


def test_every_difference_is_listed_with_its_processes():
    reference = [("a", "float32[2]"), ("w", "float32[3,4]")]
    other = [("a", "float32[2]"), ("w", "float32[3,5]"), ("c", "int32[]")]
    half = [("w", "bfloat16[3,4]")]
    assert differences([reference, half, other, other]) == [
        "a: float32[2] on processes 0, 2, 3, missing on process 1",
        "w: float32[3,4] on process 0, bfloat16[3,4] on process 1, float32[3,5] on processes 2, 3",
        "c: missing on processes 0, 1, int32[] on processes 2, 3",
    ]


def test_another_order_is_a_difference():
    lines = [("a", "float32[2]"), ("b", "float32[2]")]
    assert differences([lines, lines[::-1], lines, lines[::-1]]) == [
        "the same leaves in another order than process 0 on processes 1, 3"
    ]


def test_a_digest_is_of_the_values_of_all_arrays():
    x, y = np.arange(12.0).reshape(4, 3), np.ones(4, np.int32)
    whole = digest([x, y])
    assert whole == digest([np.asfortranarray(x), jnp.asarray(y)])
    assert len({whole, digest([x[:2], y]), digest([y]), digest([jax.random.key(0)])}) == 4


def test_values_are_described_where_one_process_alone_has_them():
    ((name, what),) = describe({"w": np.ones(2, np.float32)}, with_values=True)
    assert (name, what) == ("w", f"float32[2] of values {digest([np.ones(2, np.float32)])}")
    struct = jax.ShapeDtypeStruct((2,), np.float32)
    assert describe({"w": struct}, with_values=True) == [("w", "float32[2]")]


def test_one_process_agrees_with_itself():
    js.check_same_tree({"w": np.ones(3)})


def two_processes(folder: Path, entry: str, kind: str) -> list[str]:
    """What both print; both must finish within `SECONDS`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = Path(__file__).with_name("process.py")
    outputs = [folder / f"out{rank}" for rank in range(2)]
    errors = [folder / f"err{rank}" for rank in range(2)]
    with contextlib.ExitStack() as files:
        processes = [
            subprocess.Popen(
                [sys.executable, str(script), str(port), str(rank), entry, kind],
                stdin=subprocess.PIPE,
                stdout=files.enter_context(outputs[rank].open("w")),
                stderr=files.enter_context(errors[rank].open("w")),
            )
            for rank in range(2)
        ]
    try:
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline and not all(
            process.poll() is not None or "DONE" in out.read_text()
            for process, out in zip(processes, outputs, strict=True)
        ):
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    for out, err in zip(outputs, errors, strict=True):
        assert "DONE" in out.read_text(), f"{out.read_text()}\n{err.read_text()[-2000:]}"
    return [out.read_text() for out in outputs]


@pytest.mark.usefixtures("quick_processes")
@pytest.mark.parametrize("entry", sweep(["init", "train"], "train".__eq__))
def test_trees_that_differ_are_listed_on_both(entry, tmp_path):
    stack = "2," if entry == "init" else ""
    for out in two_processes(tmp_path, entry, "differ"):
        assert "VALUE_ERROR" in out
        assert "differ between processes" in out
        for line in (
            f"b: float32[{stack}2] on process 0, float32[{stack}4] on process 1",
            f"c: missing on process 0, float32[{stack}2] on process 1",
        ):
            assert line in out


@pytest.mark.usefixtures("quick_processes")
def test_equal_trees_train_as_in_one_process(tmp_path):
    step = js.make_train_step(
        lambda p, batch: ((batch @ p["w"]) ** 2).mean() + p["b"].sum(),
        optax.sgd(0.1),
        sync=js.slowmo("replica", base=js.local_sgd("replica", sync_every=2), sync_every=4),
        mesh=js.virtual_mesh({"replica": 2}),
    )
    state = step.init({"w": np.ones(3, np.float32), "b": np.ones(2, np.float32)})
    rows = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    for _ in range(4):
        state, _ = step(state, rows)
    for rank, out in enumerate(two_processes(tmp_path, "train", "equal")):
        w = np.ones(3)
        for batch in (rows, rows[:4]):
            w = w - 0.1 * 2 * batch.T @ (batch @ w) / len(batch)
        uneven = next(x for x in out.splitlines() if x.startswith("UNEVEN"))
        np.testing.assert_allclose(ast.literal_eval(uneven.removeprefix("UNEVEN ")), w, rtol=1e-5)
        odd = "same leaves and shapes throughout" if rank else "other shapes on another process"
        assert odd in next(x for x in out.splitlines() if x.startswith("ODD"))
        assert "IN_SYNC SyncReport(num_leaves=2, num_replicas=2, divergences=())" in out
        assert "OUT_OF_SYNC check_in_sync: 1 leaves differ" in out
        assert ": w: replica 1 by 0.5 in 1 of 3 elements." in out
        line = next(x for x in out.splitlines() if x.startswith("PARAMS"))
        found = ast.literal_eval(line.removeprefix("PARAMS "))
        np.testing.assert_allclose(found, np.asarray(state.params["w"])[0], rtol=1e-6)


VALUES = """
import numpy as np
import jaxslowmo as js
mesh = js.make_mesh({"replica": 2})
equal = {"w": np.arange(6.0).reshape(2, 3), "s": 1.5, "k": jax.random.key(3), "i": np.int64(4)}
for name, x in js.replicate(equal, mesh=mesh).items():
    here = x.addressable_data(0)
    bits = jax.random.key_data(here) if name == "k" else here
    print(name, x.dtype, x.shape, np.asarray(bits)[0].tolist())
try:
    js.replicate({**equal, "w": np.ones(3) * rank}, mesh=mesh)
except ValueError as error:
    print(error)
"""


@pytest.mark.usefixtures("quick_processes")
def test_other_values_are_told_in_one_line(tmp_path):
    """Such as of another seed; jax would print both arrays, after all processes gathered them."""
    first, second = of_two_processes(VALUES, tmp_path)
    assert first == second
    *placed, said = first.splitlines()
    assert placed == [
        "i int32 (2,) 4",
        "k key<fry> (2,) [0, 3]",
        "s float32 (2,) 1.5",
        "w float32 (2, 2, 3) [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]",
    ]
    assert re.fullmatch(
        r"params: .* differ between processes: w: float32\[3\] of values \w{16} on process 0, "
        r"float32\[3\] of values \w{16} on process 1; all must start from the same seed or file\.",
        said,
    )
