"""What a step with tables costs that grows with their rows: what an exchange moves, no more."""

import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support.exhaustive import sweep

local = js.local_sgd("replica", sync_every=4)
WAYS = {
    "gradients": {"gradients": js.all_reduce_gradients("replica")},
    "apart": {"sync": "none"},
    "local_sgd": {"sync": local},
    "slowmo": {"sync": js.slowmo("replica", base=local, sync_every=8)},
    "slowmo_whole": {"sync": js.slowmo("replica", base=local, sync_every=8, shard_state=False)},
    "slowmo_own": {"sync": js.slowmo("replica", base=local, sync_every=8, exact_average=False)},
    "diloco": {"sync": js.diloco("replica", sync_every=4)},
    "only_finite": {"sync": js.only_finite(local)},
}
# Of what shares tables, slow momentum in the usual run.
CASES = sweep(
    [(way, num_shards) for way in WAYS for num_shards in (1, 2)],
    lambda way, num_shards: num_shards == 1 or way == "slowmo",
)
EXCHANGING = [case for case in CASES if case.values[0] not in ("gradients", "apart")]
DIM = 8
# What names a buffer, or changes rows of it where it lies.
IN_PLACE = {"parameter", "get-tuple-element", "bitcast", "conditional", "tuple", "scatter"}


def compiled(num_rows, num_shards, mode, **parts):
    sizes = {"replica": 2} if num_shards == 1 else {"replica": 2, "shard": num_shards}
    embeddings = js.embeddings(
        {"ids": js.Table(num_rows, DIM)},
        axis_name=None if num_shards == 1 else "shard",
        optimizer=js.rowwise_adagrad(0.1),
    )

    def loss(params, batch, *, embedded):
        return jnp.mean((embedded["ids"] @ params["w"] - batch["y"]) ** 2)

    step = js.make_train_step(
        loss, optax.adam(0.1), mesh=js.make_mesh(sizes), embeddings=embeddings, mode=mode, **parts
    )
    size = 16 * 2 * num_shards
    batch = {"ids": np.arange(size) % num_rows, "y": np.zeros(size, np.float32)}
    return step.compiled(step.init({"w": jnp.zeros(DIM)}), batch)


@pytest.mark.parametrize(("way", "num_shards"), CASES)
def test_memory_of_local_steps_does_not_depend_on_the_number_of_rows(way, num_shards):
    def temporaries(num_rows):
        program = compiled(num_rows, num_shards, "host", **WAYS[way])
        return program.memory_analysis().temp_size_in_bytes

    assert temporaries(1 << 12) == temporaries(1 << 14)


def test_memory_of_traced_steps_is_what_enters_and_leaves_the_exchange():
    def temporaries(num_rows):
        program = compiled(num_rows, 1, "traced", sync=local)
        return program.memory_analysis().temp_size_in_bytes

    few, many = 1 << 12, 1 << 14
    more = (many - few) * DIM * 4
    assert temporaries(many) - temporaries(few) <= 2 * more + more // 100


def computations(text):
    """The instructions of each computation of a compiled program, by its name."""
    found, lines = {}, None
    for line in text.splitlines():
        if start := re.match(r"(ENTRY )?%([\w.\-]+) \(", line):
            lines = found.setdefault("entry" if start[1] else start[2], [])
        elif lines is not None:
            lines.append(line.strip())
    return found


def writes(instructions, known, num_elements):
    """Operations that write a whole array of at least so many elements."""
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


@pytest.mark.parametrize(("way", "num_shards"), EXCHANGING)
def test_traced_local_steps_write_rows_alone(way, num_shards):
    num_rows = 1 << 12
    known = computations(compiled(num_rows, num_shards, "traced", **WAYS[way]).as_text())
    smallest = num_rows // num_shards  # an accumulator of the row-wise optimizer
    assert writes(known["entry"], known, smallest) == []
    table = {1: f"f32[{num_rows},{DIM}]", 2: f"f32[{num_rows // 2},{DIM}]"}[num_shards]
    (choice,) = [
        x
        for x in known["entry"]
        if table in x.partition(" conditional(")[0] and " conditional(" in x
    ]
    branches = re.findall(
        r"%([\w.\-]+)", re.search(r"(branch|true)_computation.*?metadata", choice)[0]
    )
    assert len(branches) == 2
    written = [writes(known[name], known, smallest) for name in branches]
    assert [] in written  # the local step
    assert any(written)  # the exchange: there was something to find
