"""Local steps write rows of tables where they lie: what grows with the tables is the exchange."""

import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js

LOCAL = js.local_sgd("replica", sync_every=4)
SLOWMO = js.slowmo("replica", base=LOCAL, sync_every=8)
CASES = {"slowmo": (SLOWMO, 2), "only_finite": (js.only_finite(LOCAL), 1)}
DIM = 8
# What names a buffer, or changes rows of it where it lies.
IN_PLACE = {"parameter", "get-tuple-element", "bitcast", "conditional", "tuple", "scatter"}


def compiled(num_rows, num_shards, sync):
    sizes = {"replica": 2} if num_shards == 1 else {"replica": 2, "shard": num_shards}
    embeddings = js.embeddings(
        {"ids": js.Table(num_rows, DIM)},
        axis_name=None if num_shards == 1 else "shard",
        optimizer=js.rowwise_adagrad(0.1),
    )

    def loss(params, batch, *, embedded):
        return jnp.mean((embedded["ids"] @ params["w"] - batch["y"]) ** 2)

    step = js.make_train_step(
        loss, optax.adam(0.1), mesh=js.make_mesh(sizes), embeddings=embeddings, sync=sync
    )
    size = 16 * 2 * num_shards
    batch = {"ids": np.arange(size) % num_rows, "y": np.zeros(size, np.float32)}
    return step.compiled(step.init({"w": jnp.zeros(DIM)}), batch)


def computations(text):
    """Return the instructions of each computation of a compiled program, by its name."""
    found, lines = {}, None
    for line in text.splitlines():
        if start := re.match(r"(ENTRY )?%([\w.\-]+) \(", line):
            lines = found.setdefault("entry" if start[1] else start[2], [])
        elif lines is not None:
            lines.append(line.strip())
    return found


def writes(instructions, known, num_elements):
    """Return operations that write a whole array of at least so many elements."""
    found = []
    for line in instructions:
        made = re.match(r"(?:ROOT )?%[\w.\-]+ = \w+\[([\d,]+)\]\S* ([\w\-]+)\(", line)
        if made is None or np.prod([int(n) for n in made[1].split(",")]) < num_elements:
            continue
        operation = made[2]
        if operation == "fusion":
            called = re.search(r"calls=%([\w.\-]+)", line)[1]
            root = next(x for x in known[called] if x.startswith("ROOT"))
            operation = re.search(r" ([\w\-]+)\(", root)[1]
        if operation not in IN_PLACE:
            found.append(line)
    return found


@pytest.mark.parametrize("name", CASES)
def test_traced_local_steps_write_rows_alone(name):
    num_rows, (sync, num_shards) = 1 << 12, CASES[name]
    known = computations(compiled(num_rows, num_shards, sync).as_text())
    smallest = num_rows // num_shards  # an accumulator of the row-wise optimizer
    assert writes(known["entry"], known, smallest) == []
    table = f"f32[1,{smallest},{DIM}]"  # of one replica
    choices = [
        x
        for x in known["entry"]
        if table in x.partition(" conditional(")[0] and " conditional(" in x
    ]
    assert len(choices) == len(sync.algorithm.events)  # one after the other
    for choice in choices:
        branches = re.findall(
            r"%([\w.\-]+)", re.search(r"(branch|true)_computation.*?metadata", choice)[0]
        )
        assert len(branches) == 2
        written = [writes(known[name], known, smallest) for name in branches]
        assert [] in written  # the local step
        assert any(written)  # the exchange: there was something to find
