"""Check what several processes give and get in one run of two, with two devices each.

Devices 0 and 1 are the first process', 2 and 3 the second's.
"""

import json
import re

import jax
import numpy as np
import pytest

from support.pairs import two_processes

pytestmark = pytest.mark.xdist_group("two processes that train")  # they share the run

# What each process gives of one array.
PARTS = """
import functools
import json
import math
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec as P
import jaxslowmo as js
from jaxslowmo._support.coordinator import write_note, wait_for_note
from jaxslowmo.train import addressable_shard_numbers

devices = sorted(jax.devices(), key=lambda d: d.id)
rng = np.random.default_rng(0)
WHOLE = rng.normal(size=(2, 8, 3)).astype(np.float32)
WEIGHT = np.array([1, 3], np.float32)
START = {"w": np.ones((3, 2), np.float32)}
said = {}

def loss(params, batch):
    return ((batch @ params["w"]) ** 2).mean()

def values(tree):
    shards = [shard for x in jax.tree.leaves(tree) for shard in x.addressable_shards]
    return [np.asarray(shard.data).tolist() for shard in shards]

def train(step, params, give, weight=None):
    state = step.init(params)
    for batch in WHOLE:
        state, metrics = step(state, give(batch), weight)
    return values((state.params, metrics))

def over(mesh, *axes):
    sharding = NamedSharding(mesh, P(*axes))
    return lambda x: jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])

local = jax.make_mesh((2,), ("local",), devices=jax.local_devices())  # with an Explicit axis
here_split = lambda x: jax.device_put(x, NamedSharding(local, P("local")))

def compare(name, mesh, axes, spec=None, weighted=False, globally=False):
    own = addressable_shard_numbers(mesh, axes)
    here = list(addressable_shard_numbers(mesh, ("replica",)))
    count = math.prod(mesh.shape[a] for a in axes)
    mine = lambda x: np.concatenate([np.split(x, count)[i] for i in own])
    weight = WEIGHT if weighted else None
    part = None if weight is None else weight[here]
    params = jax.tree.map(over(mesh, *spec), START) if spec else START
    make = functools.partial(
        js.make_train_step, loss, optax.sgd(0.1), sync=js.local_sgd("replica", sync_every=1),
        mesh=mesh,
    )
    step = make()
    known = None if weight is None else over(mesh, "replica")(weight)
    wanted = train(step, params, over(mesh, axes), known)
    one = lambda x: jax.device_put(mine(x), jax.local_devices()[0])
    gives = (mine,) if spec or weighted else (mine, one, lambda x: here_split(mine(x)))
    found = [train(step, params, give, part) for give in gives]
    if globally:
        step = make(host_batch="global")
        found += [train(step, params, give, weight) for give in (lambda x: x, here_split)]
    said[name] = [own, all(x == wanted for x in found)]

def drawn(params, batch, *, model_state):
    return loss(params, batch), ({"drawn": jax.random.uniform(model_state["key"])}, model_state)

grid = lambda *rows: np.array([[devices[i] for i in row] for row in rows])
one_axis = lambda *row: jax.sharding.Mesh(grid(row)[0], ("replica",))
two = jax.sharding.Mesh(grid([0, 1], [2, 3]), ("replica", "device"))
spans = jax.sharding.Mesh(grid([0, 2], [1, 3]), ("replica", "device"))
compare("replicas over processes", spans, ("replica", "device"), weighted=True, globally=True)
model = jax.sharding.Mesh(grid([0, 2], [1, 3]), ("replica", "model"))
compare("same parts", model, ("replica",), spec=(None, "model"), globally=True)

# What all examples share is given by each process.
def scaled(params, batch):
    return loss(params, batch["x"] * batch["gate"]) * batch["rate"]

mine = lambda x: np.split(x, 2)[rank]
own = {"gate": np.array([[2, 1, 0]], np.float32), "rate": np.float32(0.5), "key": jax.random.key(1)}
train_shared = lambda give, shared, **options: train(
    js.make_train_step(scaled, optax.sgd(0.1), sync="none", mesh=two, **options),
    START, lambda x: {"x": give(x), **shared},
)
everywhere = {name: over(two)(own[name]) for name in ("gate", "rate")}
wanted = train_shared(over(two, ("replica", "device")), everywhere)
said["shared"] = [
    train_shared(mine, own) == wanted,
    train_shared(lambda x: x, own, host_batch="global") == wanted,
]
try:
    train_shared(mine, {**own, "rate": np.float32(rank)})
except ValueError as error:
    said["shared"].append("all examples share" in str(error))

# Nothing waits for the other process: process 0 does its local steps before process 1 begins.
sync = js.local_sgd("replica", sync_every=99)
for mode, host_batch in (("host", "local"), ("traced", "global")):
    step = js.make_train_step(
        loss, optax.sgd(0.1), sync=sync, mesh=one_axis(0, 1, 2, 3), mode=mode, host_batch=host_batch
    )
    state = step.init(START)
    is_whole = host_batch == "global"
    batch = WHOLE[0] if is_whole else WHOLE[0][4 * rank:][:4]
    weight = np.arange(4.0) if is_whole else np.ones(2)
    state, _ = step(state, batch, weight)
    if rank == 1:
        wait_for_note(f"go {mode}", 300)
    for _ in range(10):
        state, metrics = step(state, batch, weight)
    jax.block_until_ready((state, metrics))
    if rank == 0:
        write_note(f"go {mode}", "")

# jax puts bits on devices of other processes, and no keys.
step = js.make_train_step(drawn, optax.sgd(0.1), sync="none", mesh=one_axis(0, 2))
made = step.init(START, model_state={"key": jax.random.key(5)})
said["drawn"] = js.host_mean(step(made, WHOLE[0][rank:][:1])[1])["drawn"]

# What is looked at without running is of the whole, whichever way it is given.
step = js.make_train_step(loss, optax.sgd(0.1), sync=sync, mesh=two)
state = step.init(START)
shape = jax.ShapeDtypeStruct((8, 3), np.float32)
mine = WHOLE[0][4 * rank:][:4]
look = lambda x: str(step.traced_by_phase(state, x)[None].jaxpr)
said["looks"] = look(mine) == look(shape)
for name, call in {
    "rows": lambda: step(state, WHOLE[0][:3]),
    "weight": lambda: step(state, mine, np.ones(2)),
}.items():
    try:
        call()
    except ValueError as error:
        said[name] = str(error)
print(json.dumps(said))
"""
# Replicas with different amounts of data; on each process lies a part of both replicas.
UNEVEN = """
import threading

spans = jax.sharding.Mesh(np.array([[devices[i] for i in row] for row in ((0, 2), (1, 3))]),
    ("replica", "device"))
apart = jax.sharding.Mesh(np.array([devices[i] for i in (0, 2, 1, 3)]), ("replica",))
rows = np.random.default_rng(0).normal(size=(2, 3, 4, 3)).astype(np.float32)
said = {}

def train(mesh, shares, **options):
    step = js.make_train_step(
        lambda p, b: ((b @ p["w"]) ** 2).mean(), optax.sgd(0.1),
        gradients=js.all_reduce_gradients(("replica", *mesh.axis_names[1:]), divide_by="active"),
        mesh=mesh, **options,
    )
    state, weights = step.init({"w": np.ones(3, np.float32)}), []
    for batch, weight in js.train.uneven_batches(shares, mesh=mesh):
        state, metrics = step(state, batch, weight)
        weights.append(metrics["weight"].addressable_data(0).tolist())
    return state.params["w"].addressable_data(0)[0].tolist(), weights

said["global"] = train(spans, [list(rows[0][:3]), list(rows[1][:1])], host_batch="global")
# Replicas 0 and 2 are the first process', 1 and 3 the second's; each has one batch of its own.
said["apart"] = train(apart, [[rows[0][i][:2]] for i in [[0, 1], [1, 2]][rank]])
try:
    train(spans, [list(rows[0][: 2 + rank]), list(rows[1])])
except ValueError as error:
    said["rows"] = str(error)

# The first process is in a step when it asks for the next batch; the second is yet to start it.
mesh = jax.sharding.Mesh(np.array([devices[0], devices[2]]), ("replica",))
total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "replica"), mesh=mesh,
    in_specs=jax.P("replica"), out_specs=jax.P()))
sums = said["sums"] = []

def add(weight):
    sums.append(float(total(weight).addressable_data(0)[0]))

def loader():
    yield np.ones((1, 2), np.float32)
    yield np.ones((1, 2), np.float32)
    if rank:
        raise OSError(28, "No space left")
    yield np.ones((1, 2), np.float32)

batches = js.train.uneven_batches([loader()], mesh=mesh)
_, first = next(batches)
add(first)
running = threading.Thread(target=add, args=(first,))
if rank == 0:
    running.start()
    running.join(0.3)
    assert running.is_alive()
_, second = next(batches)
if rank == 1:
    running.start()
running.join()
add(second)
try:
    next(batches)
except (OSError, RuntimeError) as error:
    said["loader"] = f"{type(error).__name__} {error}"
print(json.dumps(said))
"""
# Pipelines and the loop.
PIPELINES = """
import itertools
import time

here = jax.process_index()
BATCHES = np.random.default_rng(1).normal(size=(7, 8, 3)).astype(np.float32)
mesh = js.make_mesh({"replica": 4})
step = js.make_train_step(
    lambda p, b: ((b @ p["w"]) ** 2).mean(), optax.sgd(0.1),
    sync=js.local_sgd("replica", sync_every=2), mesh=mesh,
)
start = lambda: step.init({"w": np.ones(3, np.float32)})
values = lambda metrics: [np.asarray(s.data).tolist() for s in metrics["loss"].addressable_shards]

def accumulated(depth):
    # Updates of three batches, the last of one, where replicas run out at different times.
    def share(n):
        for i, batch in enumerate(BATCHES[:n, :2]):
            time.sleep(0.02 * ((i + here) % 2))  # who is late changes
            yield batch

    counts = [2, 7, 5, 6][here * 2 : here * 2 + 2]
    joined = js.train.uneven_batches([share(n) for n in counts], mesh=mesh)
    loop = js.train_loop(step, start(), joined, accumulate=3, prefetch=depth)
    return [(values(r.metrics), np.asarray(r.metrics["weight"].addressable_data(0))[0].item())
            for r in loop]

def wrong(depth):
    rows = [4, 4, 6 - 4 * here]
    short = (b[:n] + here for b, n in zip(BATCHES, rows))
    pipeline, done = js.TrainPipeline(step, start(), short, depth=depth), 0
    try:
        for _ in pipeline:
            done += 1
    except ValueError as error:
        return done, str(error)

print(json.dumps({"wrong": wrong(2),
    "accumulated": accumulated(0) == accumulated(2) and [w for _, w in accumulated(1)]}))
"""
# Processes whose settings or programs differ are told which, all of them, before anything is sent.
SETTINGS = """
mesh = jax.sharding.Mesh(np.array([devices[0], devices[2]]), ("replica",))
loss = lambda p, batch: ((batch @ p["w"]) ** 2).mean()
def squared(p, batch):
    return loss(p, batch)

params = {"w": np.ones(3, np.float32)}
average = js.local_sgd("replica", sync_every=2)
two = js.slowmo("replica", base=average, sync_every=4)
decayed = lambda rate: optax.adamw(optax.linear_schedule(rate, 0.0, 100), weight_decay=0.1)
# What the second process is given instead.
cases = {
    "equal": ({}, {}),
    "period": ({}, {"sync": js.slowmo("replica", base=average, sync_every=8)}),
    "codec": (
        {"sync": js.local_sgd("replica", codec=js.codecs.bfloat16())},
        {"sync": js.local_sgd("replica", codec=js.codecs.float16())},
    ),
    "loss": ({}, {"loss": squared}),
    "optimizer": ({}, {"optimizer": optax.adam(0.1)}),
    "mode": ({}, {"mode": "host"}),
    "in a chain": (
        {"sync": None, "optimizer": js.chain(js.clip_by_global_norm(1.0), optax.sgd(0.1), two)},
        {"sync": None, "optimizer": js.chain(js.clip_by_global_norm(2.0), optax.sgd(0.1), two)},
    ),
    "seed": ({}, {"seed": 1}),
    "params": ({}, {"params": {"w": np.zeros(3, np.float32)}}),
}
# What only the programs tell.
def scaled(rate, table):
    def loss(p, batch):
        return rate * ((batch @ p["w"]) ** 2).mean() + (table * p["w"]).sum()
    return loss

table, host = np.arange(3, dtype=np.float32), {"mode": "host"}
cases |= {
    "equal in host mode": [{**host, "optimizer": decayed(0.1)} for _ in range(2)],
}
cases["rate, host"] = [{**host, "optimizer": decayed(rate)} for rate in (0.1, 0.2)]
cases["array in the loss, traced"] = [{"loss": scaled(0.1, table + x)} for x in (0, 1)]
if rank:  # what one process has traced before does not matter
    jax.jit(jax.grad(scaled(0.1, table)))(params, np.ones((2, 3), np.float32))
    jnp.where(np.arange(3) > 1, 0, 1), optax.adamw(0.1).init(params)
found = {}
for name, both in cases.items():
    options = {"optimizer": optax.sgd(0.1), "sync": two, "params": params, "loss": loss}
    options |= both[rank]
    initial = {"seed": options.pop("seed", 0)}
    start, mine = options.pop("params"), options.pop("loss")
    step = js.make_train_step(mine, mesh=mesh, **options)
    state = None
    try:
        state = step.init(start, **initial)
        for seed in range(4):
            rows = np.random.default_rng([seed, rank]).normal(size=(2, 3)).astype(np.float32)
            state, metrics = step(state, rows)
        js.host_mean(metrics)
        found[name] = [True, None]
    except ValueError as error:
        found[name] = [state is not None, str(error)]

# A new phase is compared at its first run, whatever its number, and other tasks are, too.
step = js.make_train_step(
    lambda p, b: (b @ p["w"]).mean() * (1.0 if len(b) == 2 else 1.0 + rank),
    optax.sgd(0.1), sync=average, mesh=mesh, mode="host",
)
state = step.init(params)
for rows in (2, 2, 3):
    try:
        state, _ = step(state, np.full((rows, 3), rank, np.float32))
    except ValueError as error:
        found["later"] = [int(state.step.addressable_data(0)[0]), str(error)]
print(json.dumps(found))
"""
# Do the batches of several processes fit together? The last one: it changes how long they wait.
FIT = """
import warnings
from jaxslowmo.train import _process_comparison

mesh = jax.sharding.Mesh(np.array([devices[0], devices[2]]), ("replica",))
said = {}

def run(name, *batches, late=0, **options):
    step = js.make_train_step(
        lambda p, b: ((b["x"] @ p["w"]) ** 2).mean(), optax.sgd(0.1),
        sync=js.local_sgd("replica", sync_every=99), mesh=mesh, **options,
    )
    state = step.init({"w": np.ones(3, np.float32)})
    time.sleep(late * rank)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            for batch in batches:
                state, metrics = step(state, {"x": batch})
                jax.block_until_ready(metrics)
            said[name] = [str(w.message) for w in found]
        except ValueError as error:
            said[name] = f"after {int(state.step.addressable_data(0)[0])}: {error}"

def rows(n, seed=rank):
    return np.random.default_rng(seed).normal(size=(n, 3)).astype(np.float32)

run("different", rows(4), rows(4, 0), rows(2))
run("alike", rows(4, 0), rows(4, 0), rows(2, 0))
run("global, different", rows(4), host_batch="global")
run("later", rows(4), rows(4), rows(2 + rank))
run("none on one", rows(4 * (1 - rank)))
_process_comparison.PATIENCE_SECONDS, _process_comparison.HINT_SECONDS = 0.5, 0.1
run("late", rows(4), late=1.2)
run("one has that shape", rows(4), rows(4) if rank else rows(2))
print(json.dumps(said))
"""

# The step of another library.
OTHER = """
ROWS = np.random.default_rng(3).normal(size=(6, 8, 3)).astype(np.float32)
START = {name: rng.normal(size=shape).astype(np.float32)
    for name, shape in {"v": (4, 2), "w": (3, 4)}.items()}
WEIGHTS = np.array([1, 3, 2, 0], np.float32)
SYNCS = {
    "diloco": lambda: js.diloco("replica", sync_every=4, fragments=2, delay=1),
    "sgp": lambda: js.slowmo("replica", base=js.sgp("replica", overlap=1), sync_every=4),
}
ADAM = optax.adam(0.05)
factor = 1.0

def library_step(state, batch, scale):
    def loss(params):
        return factor * (scale * (jnp.tanh(batch @ params["w"]) @ params["v"] - 1) ** 2).mean()
    value, grads = jax.value_and_grad(loss)(state["params"])
    updates, opt = ADAM.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": value}

def trained(mesh, sync, mode, params=START, weight=None, batches=ROWS, scans=False):
    step = js.with_exchange(
        library_step, SYNCS[sync](), mesh=mesh, mode=mode, in_axes=(0, None),
        get_params=lambda s: s["params"], set_params=lambda s, p: s | {"params": p},
    )
    state = step.init({"params": params, "opt": ADAM.init(params)})
    scale, losses = np.float32(2), []
    if scans:
        state, metrics = step.scan(state, batches, scale, weight=weight)
    else:
        for batch in batches:
            state, metrics = step(state, batch, scale, weight=weight)
    assert step.next_phase(state) == step.phase(7)
    ends = jax.tree.leaves(step.consensus(state))
    if isinstance(mesh, jax.sharding.Mesh):
        ends = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))(ends)
    return np.concatenate([np.ravel(x) for x in ends])

said = {}
four = one_axis(0, 2, 1, 3)
model = jax.sharding.Mesh(grid([0, 2], [1, 3]), ("replica", "model"))
for sync, mode, scans in (("diloco", "host", True), ("sgp", "traced", False)):
    weight = WEIGHTS if mode == "traced" else None
    own = list(addressable_shard_numbers(four, ("replica",)))
    mine = np.concatenate([ROWS[:, 2 * r : 2 * r + 2] for r in own], 1)
    part = None if weight is None else weight[own]
    wanted = trained(js.virtual_mesh({"replica": 4}), sync, mode, weight=weight)
    found = trained(four, sync, mode, weight=part, batches=mine, scans=scans)
    # A replica of devices of both processes: each gives the rows of both replicas.
    few = trained(js.virtual_mesh({"replica": 2}), sync, mode)
    params = jax.tree.map(over(model, None, "model"), START)
    spread = trained(model, sync, mode, params=params, scans=scans)
    said[f"{sync} {mode}"] = [
        float(abs(wanted - found).max()), float(abs(few - spread).max())
    ]
factor = 1.0 + rank
try:
    trained(four, "diloco", "host", batches=mine)
except ValueError as error:
    said["error"] = str(error)
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Return what each process has said in each of the programs, in their order."""
    programs = "".join((PARTS, UNEVEN, PIPELINES, SETTINGS, FIT, OTHER))
    printed = two_processes(programs, tmp_path_factory.mktemp("pair"), devices=2)
    each = [[json.loads(x) for x in text.splitlines() if x.startswith("{")] for text in printed]
    return list(zip(*each, strict=True))


OWN = {
    "replicas over processes": [[0, 2], [1, 3]],
    "same parts": [[0, 1], [0, 1]],
}


def test_parts_make_the_batch(said):
    """Parts make the batch that an array over all is: from NumPy, one device, two, and `"global"`.

    What does not fit names this process' share. What all examples share is given by each process.
    """
    draws = set()
    for process, told in enumerate(said[0]):
        for name, parts in OWN.items():
            assert told[name] == [parts[process], True], name
        assert told["looks"]
        assert told["shared"] == [True] * 3, told["shared"]
        draws.add(told["drawn"])
        assert "multiple of 2, this process' share of 4" in told["rows"]
        assert "(3, 3)" in told["rows"]
        assert "1 of 2, got (2,)" in told["weight"]
    assert len(draws) == 2
    assert float(jax.random.uniform(jax.random.key(5))) in draws


def test_replicas_have_different_amounts_of_data(said):
    """Replicas that two processes share count once; those of one process need not be neighbours.

    Processes ask each other past their devices: an exchange between these would stand behind the
    step, which waits for the other process. A loader that fails on one ends the loops of all.
    """
    rows = np.random.default_rng(0).normal(size=(2, 3, 4, 3)).astype(np.float32)

    def trained(*batches):
        w = np.ones(3)
        for replicas in batches:
            w = w - 0.1 * np.mean([2 * x.T @ (x @ w) / len(x) for x in replicas], axis=0)
        return w

    wanted = trained([rows[0][0], rows[1][0]], [rows[0][1]], [rows[0][2]])
    apart = trained([rows[0][i][:2] for i in (0, 1, 1, 2)])
    both = said[1]
    for told in both:
        np.testing.assert_allclose(told["global"][0], wanted, rtol=1e-5)
        assert told["global"][1] == [[4], [4], [4]]
        np.testing.assert_allclose(told["apart"][0], apart, rtol=1e-5)
        assert "share replicas [0]" in told["rows"]
        assert told["sums"] == [2, 2, 2]
    assert both[1]["loader"] == "OSError [Errno 28] No space left"
    assert both[0]["loader"].startswith("RuntimeError")
    assert "process 1 ended in an error: OSError: [Errno 28] No space left" in both[0]["loader"]


def test_results_do_not_depend_on_who_is_late(said):
    """Whoever is late: the same results with and without threads, and errors on both alike."""
    for told, weights in zip(said[2], ([4, 0, 0], [6, 4, 0]), strict=True):
        assert told["accumulated"] == weights  # of the first replica of each process
        done, error = told["wrong"]
        assert done == 2
        assert "`batch`" in error


MATCHES = {
    "global, different": "after 0: .*processes 0 and 1 give",
    "later": r"after 2: .*x: float32\[4,3\] on process 0, float32\[6,3\] on process 1",
    "none on one": r"after 0: .*multiple of 1, .*, got x \(0, 3\)",
}


def test_what_both_say_of_batches_that_do_not_fit(said):
    """The same on both, in one line; of one that is late, or alone with a shape, a warning."""
    both = said[4]
    for told in both:
        assert told["different"] == []
        (warning,) = told["alike"]
        assert "processes 0, 1 give the same data" in warning
        for name, wanted in MATCHES.items():
            assert re.match(wanted, told[name].replace("process 1: ", "")), told[name]
            assert "\n" not in told[name]
        late, *_ = told["late"]  # programs may be late, too
        assert "process 1 did not report within 0.5 s what it gives" in late
    batch, program = both[0]["one has that shape"]
    assert "in step 2 process 1 did not report within 0.1 s" in batch
    assert "`update` process 1 did not report within 0.1 s" in program
    assert both[1]["one has that shape"] == []


# What the message names, and what it does not.
NAMED = {
    "equal": None,
    "period": "`sync`.sync_every",
    "codec": "`sync`.codec",
    "loss": "`loss_fn`: __main__.<lambda> on process 0, __main__.squared on process 1",
    "optimizer": "`optimizer.init(params)`['0/mu/w']: missing on process 0, ",
    "mode": "`mode`: 'traced' on process 0, 'host' on process 1",
    "in a chain": "`optimizer`.transforms[0].max_norm: 1.0 on process 0, 2.0 on process 1",
    "seed": "`seed`: 0 on process 0, 1 on process 1",
    "params": "params: ",
}


EQUATIONS, CONSTANTS = (
    f"programs differ between processes: {x} of `update`" for x in ("equations", "constants")
)
OF_PROGRAMS = {
    "equal in host mode": None,
    "rate, host": f"{EQUATIONS} of phase 'local': ",
    "array in the loss, traced": f"{CONSTANTS}: ",
    "later": f"{EQUATIONS} of phase 'local': ",
}


def test_settings_are_compared(said):
    first, second = said[3]
    assert first == second
    assert first.keys() == {**NAMED, **OF_PROGRAMS}.keys()
    for name, wanted in NAMED.items():
        has_state, error = first[name]
        assert has_state == (wanted is None), (name, error)
        if wanted is None:
            assert error is None
        else:
            assert wanted in error, error
            others = {"`sync`", "`optimizer`", "`gradients`", "`mode`", "params: "}
            assert not any(x in error for x in others if x not in wanted), error


def test_programs_are_compared(said):
    """Before their first run, by their equations and the values of their constants."""
    for name, wanted in OF_PROGRAMS.items():
        has_run, error = said[3][0][name]
        assert has_run, name
        assert error is None if wanted is None else wanted in error, error
        assert error is None or re.search(" [0-9a-f]{16} on process 0, [0-9a-f]{16} on ", error)
    assert said[3][0]["later"][0] == 2


def test_the_step_of_another_library_trains_as_in_one_process(said):
    """By calls and by a scan, with weights, and with replicas of devices of both processes.

    A program that differs is named on both.
    """
    for found in said[5]:
        assert "processes: equations of `update`" in found.pop("error")
        assert len(found) == 2
        assert all(max(differences) < 2e-5 for differences in found.values()), found
