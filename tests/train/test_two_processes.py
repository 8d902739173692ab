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
import json, math, threading, warnings
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import jaxslowmo as js
from jaxslowmo.train import addressable_shard_numbers

devices = sorted(jax.devices(), key=lambda d: d.id)
rng = np.random.default_rng(0)
WHOLE = rng.normal(size=(2, 8, 3)).astype(np.float32)
WEIGHT = np.array([1, 3], np.float32)
START = {"w": np.ones((3, 2), np.float32)}
said, sgd = {}, optax.sgd(0.1)

def loss(params, batch):
    return ((batch @ params["w"]) ** 2).mean()

def shards_of(tree):
    shards = [shard for x in jax.tree.leaves(tree) for shard in x.addressable_shards]
    return [np.asarray(shard.data).tolist() for shard in shards]

def refused(call):
    try:
        call()
    except (ValueError, OSError, RuntimeError) as error:
        return f"{type(error).__name__} {error}"

def train(step, params, give, weight=None):
    state = step.init(params)
    for batch in WHOLE:
        state, metrics = step(state, give(batch), weight)
    return shards_of((state.params, metrics))

def over(mesh, *axes):
    sharding = NamedSharding(mesh, P(*axes))
    return lambda x: jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])

grid = lambda *rows: np.array([[devices[i] for i in row] for row in rows])
one_axis = lambda *row: Mesh(grid(row)[0], ("replica",))
apart, across = one_axis(0, 2), one_axis(0, 2, 1, 3)
two = Mesh(grid([0, 1], [2, 3]), ("replica", "device"))
spans = Mesh(grid([0, 2], [1, 3]), ("replica", "device"))
model = Mesh(grid([0, 2], [1, 3]), ("replica", "model"))
local = jax.make_mesh((2,), ("local",), devices=jax.local_devices())  # with an Explicit axis
here_split = lambda x: jax.device_put(x, NamedSharding(local, P("local")))

def compare(name, mesh, axes, spec=(), weight=None):
    own = addressable_shard_numbers(mesh, axes)
    count = math.prod(mesh.shape[a] for a in axes)
    mine = lambda x: np.concatenate([np.split(x, count)[i] for i in own])
    params = jax.tree.map(over(mesh, *spec), START) if spec else START
    known = part = weight
    if weight is not None:
        known = over(mesh, "replica")(weight)
        part = weight[list(addressable_shard_numbers(mesh, ("replica",)))]
    sync = js.local_sgd("replica", sync_every=1)
    step = js.make_train_step(loss, sgd, sync=sync, mesh=mesh)
    wanted = train(step, params, over(mesh, axes), known)
    one = lambda x: jax.device_put(mine(x), jax.local_devices()[0])
    found = [train(step, params, give, part) for give in (mine, one)]
    step = js.make_train_step(loss, sgd, sync=sync, mesh=mesh, host_batch="global")
    found += [train(step, params, give, weight) for give in (lambda x: x, here_split)]
    said[name] = [own, all(x == wanted for x in found)]

compare("replicas over processes", spans, ("replica", "device"), weight=WEIGHT)
compare("same parts", model, ("replica",), spec=(None, "model"))

# What all examples share is given by each process.
def scaled(params, batch):
    return loss(params, batch["x"] * batch["gate"]) * batch["rate"]

mine = lambda x: np.split(x, 2)[rank]
own = {"gate": np.array([[2, 1, 0]], np.float32), "rate": np.float32(0.5), "key": jax.random.key(1)}
train_shared = lambda give, shared: train(
    js.make_train_step(scaled, sgd, sync="none", mesh=two), START,
    lambda x: {"x": give(x), **shared})
everywhere = {name: over(two)(own[name]) for name in ("gate", "rate")}
said["shared"] = train_shared(mine, own) == train_shared(
    over(two, ("replica", "device")), everywhere)
said["not shared"] = refused(lambda: train_shared(mine, {**own, "rate": np.float32(rank)}))

# jax puts bits on devices of other processes, and no keys.
def drawn(params, batch, *, model_state):
    return loss(params, batch), ({"drawn": jax.random.uniform(model_state["key"])}, model_state)

step = js.make_train_step(drawn, sgd, sync="none", mesh=apart)
made = step.init(START, model_state={"key": jax.random.key(5)})
said["drawn"] = js.host_mean(step(made, WHOLE[0][rank:][:1])[1])["drawn"]

# What is looked at without running is of the whole, whichever way it is given.
step = js.make_train_step(loss, sgd, sync="none", mesh=two)
state, half = step.init(START), WHOLE[0][4 * rank:][:4]
look = lambda x: str(step.traced_by_phase(state, x)[None].jaxpr)
said["looks"] = look(half) == look(jax.ShapeDtypeStruct((8, 3), np.float32))
said["rows"] = refused(lambda: step(state, WHOLE[0][:3]))
said["weight"] = refused(lambda: step(state, half, np.ones(2)))
print(json.dumps(said))
"""
# Replicas with different amounts of data.
UNEVEN = """
rows = np.random.default_rng(0).normal(size=(2, 3, 4, 3)).astype(np.float32)
said = {}

def train(mesh, shares, **options):
    reduced = js.all_reduce_gradients(("replica", *mesh.axis_names[1:]), divide_by="active")
    step = js.make_train_step(loss, sgd, gradients=reduced, mesh=mesh, **options)
    state, weights = step.init({"w": np.ones(3, np.float32)}), []
    for batch, weight in js.train.uneven_batches(shares, mesh=mesh):
        state, metrics = step(state, batch, weight)
        weights.append(metrics["weight"].addressable_data(0).tolist())
    return state.params["w"].addressable_data(0)[0].tolist(), weights

# On each process lies a part of both replicas.
said["global"] = train(spans, [list(rows[0][:3]), list(rows[1][:1])], host_batch="global")
# Replicas 0 and 2 are the first process', 1 and 3 the second's; each has one batch of its own.
said["apart"] = train(across, [[rows[0][i][:2]] for i in [[0, 1], [1, 2]][rank]])
said["rows"] = refused(lambda: train(spans, [list(rows[0][: 2 + rank]), list(rows[1])]))

# The first process is in a step when it asks for the next batch; the second is yet to start it.
total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "replica"), mesh=apart,
    in_specs=P("replica"), out_specs=P()))
sums = said["sums"] = []

def add(weight):
    sums.append(float(total(weight).addressable_data(0)[0]))

def loader():
    yield np.ones((1, 2), np.float32)
    yield np.ones((1, 2), np.float32)
    if rank:
        raise OSError(28, "No space left")
    yield np.ones((1, 2), np.float32)

batches = js.train.uneven_batches([loader()], mesh=apart)
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
said["loader"] = refused(lambda: next(batches))

B = np.random.default_rng(1).normal(size=(3, 8, 3)).astype(np.float32)
step = js.make_train_step(
    loss, sgd, sync=js.local_sgd("replica", sync_every=2), mesh=js.make_mesh({"replica": 4}))
start = lambda: step.init({"w": np.ones(3, np.float32)})

short, done = (b[:n] + rank for b, n in zip(B, [4, 4, 6 - 4 * rank])), []
said["short"] = refused(lambda: done.extend(js.TrainPipeline(step, start(), short))), len(done)
print(json.dumps(said))
"""
# Processes whose settings or programs differ are told which, all of them, before anything is sent.
SETTINGS = """
def squared(p, batch):
    return loss(p, batch)

def scaled(rate, table):
    def loss(p, batch):
        return rate * ((batch @ p["w"]) ** 2).mean() + (table * p["w"]).sum()
    return loss

average, table = js.local_sgd("replica", sync_every=2), np.arange(3, dtype=np.float32)
slow = js.slowmo("replica", base=average, sync_every=4)
decayed = lambda rate: optax.adamw(optax.linear_schedule(rate, 0.0, 100), weight_decay=0.1)
# What each process is given.
cases = {
    "equal": [{}, {}],
    "period": [{}, {"sync": js.slowmo("replica", base=average, sync_every=8)}],
    "loss": [{}, {"loss": squared}],
    "optimizer": [{}, {"optimizer": optax.adam(0.1)}],
    "mode": [{}, {"mode": "host"}],
    "seed": [{}, {"seed": 1}],
    "params": [{}, {"params": {"w": np.zeros(3, np.float32)}}],
    # What only the programs tell.
    "rate": [{"mode": "host", "optimizer": decayed(rate)} for rate in (0.1, 0.2)],
    "array": [{"loss": scaled(0.1, table + x)} for x in (0, 1)],
}
if rank:  # what one process has traced before does not matter
    jax.jit(jax.grad(scaled(0.1, table)))({"w": table}, np.ones((2, 3), np.float32))
found = {}
for name, both in cases.items():
    options = {"optimizer": sgd, "sync": slow, "loss": loss, "params": {"w": table}, "seed": 0}
    options |= both[rank]
    start, seed, fn = (options.pop(key) for key in ("params", "seed", "loss"))
    state, step = [], js.make_train_step(fn, mesh=apart, **options)

    def run():
        state.append(step.init(start, seed=seed))
        for t in range(4):
            state[0], metrics = step(state[0], WHOLE[0][2 * rank + t:][:2])
        js.host_mean(metrics)

    error = refused(run)
    found[name] = [bool(state), error]

# A new program is compared at its first run, whatever its number.
step = js.make_train_step(
    lambda p, b: (b @ p["w"]).mean() * (1.0 if len(b) == 2 else 1.0 + rank),
    sgd, sync=average, mesh=apart, mode="host",
)
state = step.init({"w": table})
for _ in range(2):
    state, _ = step(state, WHOLE[0][rank:][:2])
found["later"] = [True, refused(lambda: step(state, WHOLE[0][rank:][:3]))]
print(json.dumps(found))
"""
# The step of another library.
OTHER = """
ROWS = np.random.default_rng(3).normal(size=(6, 8, 3)).astype(np.float32)
FIRST = {"w": rng.normal(size=(3, 4)).astype(np.float32)}
sync = js.slowmo("replica", base=js.sgp("replica", overlap=1), sync_every=4)
factor = 1.0

def library_step(params, batch):
    value, grads = jax.value_and_grad(lambda p: factor * loss(p, batch))(params)
    return jax.tree.map(lambda p, g: p - 0.05 * g, params, grads), {"loss": value}

def trained(mesh, params=FIRST, weight=None, batches=ROWS, scans=False):
    step = js.with_exchange(
        library_step, sync, mesh=mesh, mode="host",
        get_params=lambda s: s, set_params=lambda s, p: p,
    )
    state = step.init(params)
    if scans:
        state, _ = step.scan(state, batches, weight=weight)
    else:
        for batch in batches:
            state, _ = step(state, batch, weight=weight)
    end = step.consensus(state)["w"]
    if isinstance(mesh, Mesh):
        end = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))(end)
    return np.asarray(end)

weight = np.array([1, 3, 2, 0], np.float32)
own = list(addressable_shard_numbers(across, ("replica",)))
mine = np.concatenate([ROWS[:, 2 * r : 2 * r + 2] for r in own], 1)
wanted = trained(js.virtual_mesh({"replica": 4}), weight=weight)
found = trained(across, weight=weight[own], batches=mine, scans=True)
# A replica of devices of both processes: each gives the rows of both replicas.
few = trained(js.virtual_mesh({"replica": 2}))
spread = trained(model, {"w": over(model, None, "model")(FIRST["w"])})
said = {"apart": [float(abs(wanted - found).max()), float(abs(few - spread).max())]}
factor = 1.0 + rank
said["error"] = refused(lambda: trained(across, batches=mine))
print(json.dumps(said))
"""
# Do the batches of several processes fit together?
FIT = """
said = {}

def run(name, *batches, mesh=apart):
    step = js.make_train_step(loss, sgd, sync=js.local_sgd("replica", sync_every=99), mesh=mesh)

    def train():
        lies = over(mesh, None, "model") if mesh is model else lambda x: x
        state = step.init({"w": lies(START["w"])})
        for batch in batches:
            state, metrics = step(state, batch)
            jax.block_until_ready(metrics)

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        error = refused(train)
    said[name] = error or [str(w.message) for w in found]

def rows(n, seed=rank):
    return np.random.default_rng(seed).normal(size=(n, 3)).astype(np.float32)

run("different", rows(4), rows(4, 0), rows(2))
run("alike", rows(4, 0))
run("other sizes", rows(4), rows(2 + rank))
run("same part", rows(4), mesh=model)
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Return what each process has said in each of the programs, in their order."""
    programs = "".join((PARTS, UNEVEN, SETTINGS, OTHER, FIT))
    printed = two_processes(programs, tmp_path_factory.mktemp("pair"), devices=2)
    each = [[json.loads(x) for x in text.splitlines() if x.startswith("{")] for text in printed]
    return list(zip(*each, strict=True))


def test_parts_make_the_batch(said):
    """Parts make the batch that an array over all is: from NumPy, one device, two, and `"global"`.

    What does not fit names this process' share. What all examples share is given by each process.
    """
    for process, told in enumerate(said[0]):
        assert told["replicas over processes"] == [[[0, 2], [1, 3]][process], True]
        assert told["same parts"] == [[0, 1], True]
        assert told["looks"]
        assert told["shared"]
        assert "all examples share" in told["not shared"]
        assert "multiple of 2, this process' share of 4" in told["rows"]
        assert "(3, 3)" in told["rows"]
        assert "1 of 2, got (2,)" in told["weight"]
    draws = {told["drawn"] for told in said[0]}
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
        error, done = told["short"]
        assert done == 2
        assert "`batch`" in error
    assert both[1]["loader"] == "OSError [Errno 28] No space left"
    assert both[0]["loader"].startswith("RuntimeError")
    assert "process 1 ended in an error: OSError: [Errno 28] No space left" in both[0]["loader"]


# What the message names, and what it does not.
NAMED = {
    "equal": None,
    "period": "`sync`.sync_every",
    "loss": "`loss_fn`: __main__.loss on process 0, __main__.squared on process 1",
    "optimizer": "`optimizer.init(params)`['0/mu/w']: missing on process 0, ",
    "mode": "`mode`: 'traced' on process 0, 'host' on process 1",
    "seed": "`seed`: 0 on process 0, 1 on process 1",
    "params": "params: ",
}
DIFFER = "programs differ between processes: "
OF_PROGRAMS = {
    "rate": f"{DIFFER}equations of `update` of phase 'local': ",
    "array": f"{DIFFER}constants of `update`: ",
    "later": f"{DIFFER}equations of `update` of phase 'local': ",
}


def test_settings_and_programs_are_compared(said):
    """Settings before there is a state; programs before their first run."""
    first, second = said[2]
    assert first == second
    assert first.keys() == {**NAMED, **OF_PROGRAMS}.keys()
    for name, wanted in {**NAMED, **OF_PROGRAMS}.items():
        has_state, error = first[name]
        assert has_state == (wanted is None or name in OF_PROGRAMS), (name, error)
        if wanted is None:
            assert error is None
            continue
        assert wanted in error, error
        if name in OF_PROGRAMS:
            assert re.search(" [0-9a-f]{16} on process 0, [0-9a-f]{16} on ", error)
        else:
            others = {"`sync`", "`optimizer`", "`gradients`", "`mode`", "params: "}
            assert not any(x in error for x in others if x not in wanted), error


def test_the_step_of_another_library_trains_as_in_one_process(said):
    """By calls and by a scan, with weights, and with replicas of devices of both processes."""
    for found in said[3]:
        assert max(found["apart"]) < 2e-5
        assert "processes: equations of `update`" in found["error"]


def test_what_both_say_of_batches_that_do_not_fit(said):
    for told in said[4]:
        assert told["different"] == []
        (warning,) = told["alike"]
        assert "processes 0, 1 give the same data" in warning
        assert "float32[4,3] on process 0, float32[6,3] on process 1" in told["other sizes"]
        assert "the same part" in told["same part"]
