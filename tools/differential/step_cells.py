"""The cells of the table of `tools/step_table.py`: a training step in each use, by algorithm.

A cell's name is "mode, algorithm, use". Only public calls are made, so that every checkout can fill
the table. All meshes have four replicas; the algorithm of two levels has them as two nodes of two.
"""

import hashlib
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js

from .problems import ROWS, batches, loss, loss_with_state, model_state, parameters, table_batches
from .runs import named

Cell = dict[str, Any]
"""The content of a cell by name of field: digests, numbers, collectives, errors."""
UPDATES = 5
COMPILED = [0]


def _count(event: str, duration_secs: float, **kwargs: object) -> None:
    del duration_secs, kwargs
    COMPILED[0] += event.endswith("backend_compile_duration")


jax.monitoring.register_event_duration_secs_listener(_count)


def _local() -> Any:
    return js.local_sgd("replica", sync_every=2)


def _slowmo(**options: Any) -> Any:
    return js.slowmo("replica", sync_every=4, momentum=0.5, learning_rate=0.1, **options)


NODES = ("node", "replica")
ALGORITHMS: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: None,
    "local_sgd": _local,
    "slowmo sharded": lambda: _slowmo(base=_local(), shard_state=True),
    "slowmo over sgp": lambda: _slowmo(base=js.sgp("replica", overlap=1), shard_state=False),
    "diloco": lambda: js.diloco("replica", sync_every=2),
    "hierarchical": lambda: js.hierarchical_local_sgd({"replica": 2, NODES: 4}),
}
STATE = {"problem": "state"}
TABLES = {"problem": "tables", "tables": ("item", "user")}
SHARDS = {**TABLES, "inner": "shard"}
ONE_TABLE = {**SHARDS, "tables": ("item",)}  # compiles in half of the time
STAGES = {"problem": "stages", "inner": "stage"}
USES: dict[str, dict[str, Any]] = {
    "plain": {},
    "windows, step": {"drive": "step"},
    "windows, apply": {"drive": "apply"},
    "accumulate": {"accumulate": 2},
    "tables": TABLES,
    "tables inner": SHARDS,
    "tables inner, windows": {**ONE_TABLE, "drive": "step"},
    "stages one_program": {**STAGES, "executor": "one_program"},
    "stages host": {**STAGES, "executor": "host"},
    "bfloat16": {"policy": "bfloat16"},
    "float16": {"policy": "float16"},
    "state sync_mean": {**STATE, "model_state": "sync_mean"},
    "state broadcast": {**STATE, "model_state": "broadcast"},
    "state local": {**STATE, "model_state": "local"},
    "weights": {"weights": True},
    "device": {"inner": "device"},
    "fsdp": {"inner": "fsdp"},
    "virtual": {"virtual": True},
    "evaluate": {"drive": "evaluate"},
    "ahead exact": {**ONE_TABLE, "drive": "ahead", "ahead": "exact"},
    "ahead stale": {**ONE_TABLE, "drive": "ahead", "ahead": "stale"},
    "ahead patched": {**ONE_TABLE, "drive": "ahead", "ahead": "patched"},
    "jit and grad": {"drive": "jit", "donate": False},
    "together": {
        **STATE,
        "inner": "device",
        "accumulate": 2,
        "policy": "bfloat16",
        "weights": True,
        "drive": "step",
    },
}
CELLS = [", ".join(parts) for parts in itertools.product(("traced", "host"), ALGORITHMS, USES)]


def _table_loss(params: Any, batch: Any, *, embedded: Any) -> Any:
    guess = jnp.tanh(sum(embedded.values()) @ params["w"])
    return jnp.mean((guess - batch["y"]) ** 2)


def _pipeline(mesh: Any, executor: str) -> tuple[Any, list[Any]]:
    """A loss of two stages of two layers each, and the layers' parameters."""

    def layer(params: Any, x: Any) -> Any:
        return x + jnp.tanh(x @ params["w"])

    def mean_square(out: Any, batch: Any) -> Any:
        return jnp.mean((out - batch[:, ::-1]) ** 2)

    model = js.LayeredModel([layer] * 4, mean_square)
    layers = [{"w": jnp.full((6, 6), 0.01 * (i + 1))} for i in range(4)]
    parts = js.partition_uniform(4, num_stages=2)
    schedule = js.schedules.by_name("one_f_one_b", 2, 4, None)
    pipe = js.pipelined(model, layers, schedule, parts=parts, mesh=mesh, executor=executor)  # type: ignore[arg-type]
    return pipe, layers


def _step(mode: str, algorithm: str, use: dict[str, Any]) -> tuple[Any, Callable[[], Any]]:
    """The step, and a function that makes its first state."""
    axes = NODES if algorithm == "hierarchical" else ("replica",)
    inner = use.get("inner")
    sizes = {"node": 2, "replica": 2} if axes == NODES else {"replica": 4}
    sizes |= {inner: 2} if inner else {}
    mesh: Any = js.virtual_mesh(sizes) if "virtual" in use else js.make_mesh(sizes)
    problem = use.get("problem")
    optimizer: Any = optax.adam(0.05)
    options = {name: use[name] for name in ("accumulate", "model_state", "donate") if name in use}
    function, params = loss, parameters()
    if problem == "state":
        function = loss_with_state
    elif problem == "tables":
        function, params = _table_loss, {"w": jnp.linspace(-1.0, 1.0, 4)}
        tables = {name: js.Table(*ROWS[name], pooling="mean") for name in use["tables"]}
        rule = js.rowwise_adagrad(0.5)
        options["embeddings"] = js.embeddings(tables, axis_name=inner, optimizer=rule)
    elif problem == "stages":
        function, params = _pipeline(mesh, use["executor"])
    elif inner == "fsdp":
        params["in"]["w"] = jax.device_put(params["in"]["w"], NamedSharding(mesh, P("fsdp")))
    if "policy" in use:
        options["policy"] = js.gradients.Policy(use["policy"])
    if use.get("policy") == "float16":
        optimizer = js.dynamic_loss_scale(optimizer, initial=2.0**8, growth_interval=2)
    sync, reduced = ALGORITHMS[algorithm](), (*axes, inner) if inner == "device" else axes
    options |= {"sync": sync} if sync else {"gradients": js.all_reduce_gradients(reduced)}
    axis: Any = axes if axes == NODES else "replica"
    make: Any = js.make_train_step
    step = make(function, optimizer, mesh=mesh, axis_name=axis, mode=mode, **options)
    started: Any = {"model_state": model_state()} if problem == "state" else {}
    return step, lambda: step.init(params, **started)


def _batches(use: dict[str, Any]) -> list[list[Any]]:
    """Three batches for each update; with weights the idle replica's hold NaN."""
    problem = use.get("problem")
    made: list[Any] = (table_batches if problem == "tables" else batches)(3 * UPDATES)
    if problem == "stages":
        made = [x for x, _ in made]
    if use.get("policy") == "float16":
        made[6][1][4] = 1e6  # an infinite loss of the second replica in the third update
    if "weights" in use:
        for x, _ in made[6:]:
            x[-4:] = np.nan
    return [made[i : i + 3] for i in range(0, len(made), 3)]


def _weights(use: dict[str, Any]) -> list[Any]:
    """Return the weights of each update; the last replica is idle from the third on."""
    return [np.array([1, 2, 3, t < 2], "f4") if "weights" in use else None for t in range(UPDATES)]


Look = Callable[[Any, Callable[[], Any]], None]


def _updates(step: Any, state: Any, use: dict[str, Any], look: Look) -> Iterator[tuple[Any, Any]]:
    """State and metrics after each update; `look` is given each state and its compiled program."""
    drive, groups = use.get("drive"), _batches(use)
    if drive == "ahead":
        ahead = step.ahead(use["ahead"])
        asked = ahead.prime(state, groups[0][0])
        for (batch, *_), after in itertools.zip_longest(groups, groups[1:]):
            following = after and after[0]
            look(state, lambda s=state, b=batch, a=asked, n=following: ahead.compiled(s, b, a, n))
            state, metrics, asked = ahead(state, batch, asked, following)
            yield state, metrics
        return
    call = jax.jit(step) if drive == "jit" else step
    for (batch, second, third), weight in zip(groups, _weights(use), strict=True):
        before, window = [], {}
        if drive in ("step", "apply"):
            for one in (second, third):
                window["window"], metrics = step.collect(state, one, weight, **window)
                before.append(metrics)
        elif drive == "evaluate":
            before = [step.evaluate(state, batch, weight)]
        if drive not in ("apply", "jit"):  # `step.compiled` does not return what these run
            look(state, lambda s=state, b=batch, w=weight, o=window: step.compiled(s, b, w, **o))
        if drive == "apply":
            state, metrics = step.apply(state, **window)
        else:
            state, metrics = call(state, batch, weight, **window)
        yield state, [*before, metrics]


def _digest(tree: Any) -> str:
    """Return a digest of the leaves in order: types, shapes and bytes, but not their names."""
    result = hashlib.sha256()
    for x in named(tree=tree).values():
        result.update(f"{x.dtype}{x.shape}".encode() + x.tobytes())
    return result.hexdigest()[:12]


def _rows(program: Any, **options: Any) -> list[str]:
    """The collectives of a program, or of one program for each phase, a line each."""
    amounts: dict[tuple[str, ...], list[int]] = {}  # whatever the content, which has rows
    for r in js.comm_report_of(program, **options).rows:
        ends = f"{'+'.join(r.dtypes)}{' in a loop' if r.in_loop else ''}"
        amount = amounts.setdefault(
            (f"{r.kind}: {r.collective} over {r.axis}", ends, r.level), [0, 0]
        )
        amount[0] += r.count
        amount[1] += r.bytes
    return sorted(
        f"{begins}, {count} of {size} bytes in all, {ends}"
        for (begins, ends, _), (count, size) in amounts.items()
    )


def _gradient(step: Any, state: Any, batch: Any) -> Any:
    """Differentiate the third update's loss by the first parameters, through an exchange."""

    def loss_after(params: Any) -> Any:
        new, metrics = state._replace(params=params), {}
        for _ in range(3):
            new, metrics = step(new, batch)
        return metrics["loss"].sum()

    return jax.grad(loss_after)(state.params)


def _emitted(step: Any, state: Any, batch: Any, use: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and functions of what is read from programs before they are compiled."""

    def lowered(function: Any, *args: Any) -> Callable[[], list[str]]:
        return lambda: _rows(jax.jit(function).lower(*args), compile=False)

    if use.get("drive") != "ahead":
        yield "emitted", lambda: _rows(step.traced_by_phase(state, batch), compile=False)
    if use.get("drive") in ("step", "apply"):
        yield "emitted by collect", lowered(step.collect, state, batch)
        yield "emitted by apply", lowered(step.apply, state, step.collect(state, batch)[0])
    elif use.get("drive") == "evaluate":
        yield "emitted by evaluate", lowered(step.evaluate, state, batch)
    elif use.get("drive") == "jit":
        yield "emitted under jit", lowered(step, state, batch)
        yield "gradient", lambda: _digest(_gradient(step, state, batch))


def _first_words(error: Exception) -> str:
    words = re.sub(r"0x[0-9a-f]+", "0x", str(error)).split()
    return " ".join([f"{type(error).__name__}:", *words[:8]])


def filled(name: str) -> Cell:
    """The cell of a name: what five updates come to, what they compile, and what these send."""
    mode, algorithm, use_name = name.split(", ", 2)
    use, cell = USES[use_name], {}
    try:
        step, start = _step(mode, algorithm, use)
        state = start()
        for field, read in _emitted(step, state, _batches(use)[0][0], use):
            try:
                cell[field] = read()
            except Exception as error:
                cell[field] = _first_words(error)
        _run(cell, step, [state, start()], use)
    except Exception as error:
        cell["error"] = _first_words(error)
    return cell


def _run(cell: Cell, step: Any, states: list[Any], use: dict[str, Any]) -> None:
    """Trains twice: for results, and for programs, when nothing is left to compile."""
    programs: dict[str, list[str]] = {}

    def look(state: Any, compiled: Callable[[], Any]) -> None:
        phase = js.spec.phase_name(step.next_phase(state)) if step.mode == "host" else "one program"
        if phase not in programs:
            mesh = {} if not isinstance(step.mesh, jax.sharding.Mesh) else {"mesh": step.mesh}
            programs[phase] = _rows(compiled(), **mesh)

    first, again = (
        _trained(_updates(step, state, use, see))
        for state, see in zip(states, (lambda state, compiled: None, look), strict=True)
    )
    differing = [field for field, value in first.items() if again[field] != value]
    cell |= first | {"compiled again": again["compiled"]}
    cell["other results again"] = [field for field in differing if field != "compiled"]
    cell |= {f"compiled, {phase}": rows for phase, rows in programs.items()}
    if "local" in programs and step.mode == "host" and step.sync is not None:
        axes = {step.axis_name} if isinstance(step.axis_name, str) else set(step.axis_name)
        over = [row for row in programs["local"] if axes & set(re.findall(r"\w+", row))]
        cell["sent over replicas by local steps"] = over


def _trained(updates: Iterator[tuple[Any, Any]]) -> Cell:
    """Digests after each update, the programs that each compiled, and where the state is."""
    cell: Cell = {"compiled": []}
    before = COMPILED[0]
    for t, (state, metrics) in enumerate(updates, 1):
        cell["compiled"].append(COMPILED[0] - before)
        trees = {**state._asdict(), "metrics": metrics}
        cell |= {f"update {t}, {name}": _digest(tree) for name, tree in trees.items()}
        cell["metrics"] = sorted(named(metrics=metrics))
        cell["placement"] = sorted(
            {
                f"{name}: {getattr(x.sharding, 'spec', 'one device')}"
                for name, tree in state._asdict().items()
                for x in jax.tree.leaves(tree)
            }
        )
        before = COMPILED[0]
    return cell
