"""PowerSGD against recorded runs of torch's `powerSGD_hook`, from its own random numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support.executions import lift
from support.golden_peers import cases, parameters

CASES = cases("ddp_powersgd.npz")
IDS = {case: i for i, case in enumerate(CASES)}
TOLERANCE = 2e-4


def hook_of(case: str) -> js.hooks.CommHook:
    given = CASES[case][0]["powersgd"]
    return js.hooks.powersgd(
        given["matrix_approximation_rank"],
        given["start_powerSGD_iter"],
        error_feedback=given.get("use_error_feedback", True),
        warm_start=given.get("warm_start", True),
        min_compression_rate=given["min_compression_rate"],
        seed=IDS[case],  # by which `recorded` knows the case
    )


def recorded(seed, count, bucket_index, index, shape):
    """The numbers that torch drew, in place of `draw_normal`."""
    (case,) = (c for c, i in IDS.items() if i == seed)
    meta, arrays = CASES[case]
    start = meta["powersgd"]["start_powerSGD_iter"]
    assert bucket_index == 0
    # torch draws for matrices of one shape together or one after the other.
    by_step = []
    for t in range(start, meta["steps"]):
        draws = [arrays[key] for j in range(9) if (key := f"randn/{t}/{j}") in arrays]
        single = [matrix for draw in draws for matrix in draw]
        if single:
            by_step.append(single)
    first = FIRST[case][index]
    chosen = np.stack([np.stack(step[first : first + shape[0]]) for step in by_step])
    assert chosen.shape[1:] == shape
    return jnp.asarray(chosen)[jnp.maximum(count - start - 1, 0)]


# Among a step's draws, the first of each shape that is compressed.
FIRST = {"0": (0, 1, 3, 4), "1": (0, 1, 3), "2": (0, 1, 3), "3": (0, 1, 3), "4": (0, 1, 3, 4)}
FIRST["w4"] = (0, 1)


@functools.cache
def trained(ids: tuple[str, ...], execution: str):
    """(parameters, state) after each step, by case, stacked over replicas; in one program."""
    chosen = {case: CASES[case] for case in ids}
    (world,) = {meta["world"] for meta, _ in chosen.values()}
    txs = {
        case: optax.chain(
            js.all_reduce_gradients("replica", hook=hook_of(case)), optax.trace(0.0), optax.sgd(0.1)
        )
        for case in chosen
    }

    def init(params):
        return {case: tx.init(params[case]) for case, tx in txs.items()}

    def step(params, states, grads):
        after = {}
        for case, tx in txs.items():
            updates, state = tx.update(grads[case], states[case], params[case])
            after[case] = optax.apply_updates(params[case], updates), state
        return {c: p for c, (p, _) in after.items()}, {c: s for c, (_, s) in after.items()}

    axes = {"replica": world}
    spread = lambda x: np.broadcast_to(x, (world, *x.shape))  # noqa: E731
    params = {c: jax.tree.map(spread, parameters(a, "init")) for c, (_, a) in chosen.items()}
    if execution == "shard_map":  # as later steps have them: else they compile once more
        params = js.replicate(
            {c: parameters(a, "init") for c, (_, a) in chosen.items()}, mesh=js.make_mesh(axes)
        )
    states = lift(init, axes, execution, (False,))(params)
    program, history = lift(step, axes, execution, (False,) * 3), []
    for t in range(min(meta["steps"] for meta, _ in chosen.values())):
        grads = {
            c: {name: x[:, t] for name, x in parameters(a, "G").items()}
            for c, (_, a) in chosen.items()
        }
        params, states = program(params, states, grads)
        history.append(jax.tree.map(np.asarray, (params, states)))
    return history


@pytest.fixture(autouse=True)
def _recorded_draws(monkeypatch):
    monkeypatch.setattr("jaxslowmo.gradients.hooks._powersgd.draw_normal", recorded)


RUNS = [(tuple("01234"), "vmap"), (("w4",), "shard_map")]


@pytest.mark.xdist_group("recorded runs of powersgd")  # they share cached results
@pytest.mark.parametrize(
    ("ids", "case", "execution"), [(ids, case, e) for ids, e in RUNS for case in ids]
)
def test_recorded_runs(ids, case, execution):
    meta, arrays = CASES[case]
    history = trained(ids, execution)
    assert len(history) == meta["steps"]
    for t, (params, states) in enumerate(history):
        reduced = states[case][1].trace
        for found, what in ((reduced, "grad"), (params[case], "param")):
            for name, wanted in parameters(arrays, what).items():
                np.testing.assert_allclose(
                    found[name], wanted[:, t], rtol=TOLERANCE, atol=TOLERANCE, err_msg=f"{name} {t}"
                )
    hook_state = history[-1][1][case][0].hook[0]
    assert_errors(meta, arrays, hook_state.error)


def assert_errors(meta, arrays, error):
    """What was lost, against the recorded memory; that has more, which changes no mean."""
    rank0 = "final_error/rank0/bucket0"
    if rank0 not in arrays:
        assert error == ()
        return
    wanted = np.stack([arrays[f"final_error/rank{r}/bucket0"] for r in range(meta["world"])])
    names = [f"p{i}" for i in meta["bucket_layout_per_step"][-1][0][2]]
    local, start = parameters(arrays, "G"), meta["powersgd"]["start_powerSGD_iter"]
    ours = {}
    for group in error:  # (world, matrices, n, m)
        fits = [n for n in names if matrix_shape(local[n].shape[2:]) == group.shape[2:]]
        ours |= {n: group[:, i] for i, n in enumerate(fits)}
    assert ours
    for name in names:
        g = local[name]
        size = g[0, 0].size
        recorded_here, wanted = wanted[:, :size], wanted[:, size:]
        if name not in ours:  # not compressed: differences to the mean, which add up to 0
            np.testing.assert_allclose(recorded_here.sum(axis=0), 0, atol=TOLERANCE)
            ours[name] = (g - g.mean(axis=0))[:, start:].sum(axis=1)
        np.testing.assert_allclose(
            ours[name].reshape(meta["world"], -1), recorded_here, rtol=TOLERANCE, atol=TOLERANCE
        )
    assert wanted.size == 0


def matrix_shape(shape):
    return (shape[0], int(np.prod(shape[1:])))


@pytest.mark.parametrize("case", ["0", "1"])
def test_bytes_are_those_that_torch_counted(case):
    meta, arrays = CASES[case]
    _, before, after = meta["compression_stats"]
    steps = meta["steps"] - meta["powersgd"]["start_powerSGD_iter"]
    tx = js.all_reduce_gradients("replica", hook=hook_of(case))

    def replica(grads):
        updates, _ = tx.update(grads, tx.init(grads))
        return updates

    world = meta["world"]
    program = lift(replica, {"replica": world}, "shard_map", (False,))
    found = js.comm_report_of(
        program.lower({n: x[:, 0] for n, x in parameters(arrays, "G").items()}), compile=False
    )
    assert found.bytes(axis="replica", kind="warm_up") * steps == 4 * before
    assert found.bytes(axis="replica", kind="powersgd") * steps == 4 * after
    assert found.count(axis="replica", kind="warm_up") == 1
    everything_is_compressed = case == "0"
    assert found.count(axis="replica", kind="powersgd") == 3 - everything_is_compressed
