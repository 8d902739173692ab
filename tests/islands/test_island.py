"""Islands train as one job does, whatever they are made of, and say what they do not take."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from islands.together import batch, loss, params, run_together
from jaxslowmo.islands import IslandsError

PERIOD, ROUNDS = 4, 20


def train(
    url: Any,
    name: str,
    replicas: slice,
    *,
    mesh: Any = None,
    sync: Any = True,
    inner: Any = None,
    periods: int = ROUNDS,
    start: Any = None,
    model: Any = None,
    **options: Any,
) -> tuple[Any, Any, Any]:
    """Return step, state and island after some periods of training."""
    options = {"deadline_seconds": 60, "sync_every": PERIOD} | options
    island = js.islands.join(str(url), name=name, **options)
    mesh = mesh or js.virtual_mesh({"replica": replicas.stop - replicas.start})
    step = js.make_train_step(
        loss,
        optax.sgd(0.05) if inner is None else inner,
        mesh=mesh,
        sync=island.transform() if sync is True else sync,
    )
    state = step.init(params() if model is None else model) if start is None else start(step)
    state = island.exchange(state)
    done = int(jax.device_get(state.step)[0])
    for t in range(done + 1, done + periods * PERIOD + 1):
        state, _ = step(state, batch(t, replicas))
        if island.due(t):
            state = island.exchange(state)
    return step, state, island


def train_two(url: Any, replicas: int, **options: Any) -> list[tuple[Any, Any, Any]]:
    """Train islands "a" and "b" of so many replicas at the same time."""
    return run_together(
        [
            functools.partial(train, url, name, slice(replicas * i, replicas * (i + 1)), **options)
            for i, name in enumerate("ab")
        ]
    )


def whole(params: Any) -> list[np.ndarray]:
    return [np.asarray(x, np.float32) for x in jax.tree.leaves(params)]


@functools.cache
def of_one_job(make: Any, replicas: int, periods: int = ROUNDS, **options: Any) -> list[np.ndarray]:
    """Return the parameters of all replicas after a run of one job."""
    sync = make("replica", sync_every=PERIOD, **options)
    mesh = js.virtual_mesh({"replica": replicas})
    step = js.make_train_step(loss, optax.sgd(0.05), mesh=mesh, sync=sync)
    state = step.init(params())
    for t in range(1, periods * PERIOD + 1):
        state, _ = step(state, batch(t, slice(0, replicas)))
    return whole(state.params)


ADAMW = optax.adamw(1e-2)


@pytest.mark.filterwarnings("ignore:slowmo without a `base`")
@pytest.mark.parametrize(
    ("make", "of_job", "islands", "options"),
    [
        (js.diloco, {"merge": 0.25}, 2, {"merge": 0.25}),
        (js.slowmo, {"momentum": 0.6}, 3, {"outer_optimizer": js.slow_momentum(0.6)}),
        (js.diloco, {"outer_optimizer": ADAMW}, 2, {"outer_optimizer": ADAMW}),
    ],
)
def test_islands_end_where_one_job_ends(make, of_job, islands, options, tmp_path):
    parts = [slice(2 * i, 2 * i + 2) for i in range(islands)]
    runs = [
        functools.partial(
            train, tmp_path, f"island-{i}", part, quorum=islands, **options,
            sync=True if i % 2 else "none",
        )
        for i, part in enumerate(parts)
    ]  # fmt: skip
    ends = [whole(state.params) for _, state, _ in run_together(runs)]
    for part, end in zip(parts, ends, strict=True):
        for one, first, job in zip(
            end, ends[0], of_one_job(make, 2 * islands, **of_job), strict=True
        ):
            if "merge" not in options:
                np.testing.assert_array_equal(one[:1], first[:1])
            # In float32 the job itself is 2e-6 from a run in float64, and islands 1e-6.
            np.testing.assert_allclose(one, job[part], rtol=0, atol=4e-6)


def test_islands_weigh_by_their_replicas_and_may_be_of_any_mesh(tmp_path):
    mesh = js.make_mesh({"replica": 2, "device": 2})
    layout = {"b": P(), "w": P("device")}  # the rows of `w` are split inside a replica
    model = {
        name: jax.device_put(x, NamedSharding(mesh, layout[name])) for name, x in params().items()
    }
    runs = [
        functools.partial(train, tmp_path, "a", slice(0, 2), mesh=mesh, model=model, quorum=3),
        functools.partial(train, tmp_path, "b", slice(2, 3), quorum=3),
        functools.partial(
            train,
            tmp_path,
            "c",
            slice(3, 12),
            quorum=3,
            mesh=js.virtual_mesh({"replica": 9}, jax.devices()[5:8]),  # none of the other islands'
            sync=js.local_sgd("replica", sync_every=PERIOD),
        ),
    ]
    for _, state, _ in run_together(runs):
        for one, job in zip(whole(state.params), of_one_job(js.diloco, 12), strict=True):
            np.testing.assert_allclose(one[0], job[0], rtol=0, atol=4e-6)


def test_half_precision_and_copies_of_parameters_follow(tmp_path):
    model = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params())
    inner = optax.contrib.schedule_free_sgd(0.1)
    options = {"model": model, "inner": inner, "quorum": 2, "periods": 3}
    (_, a, _), (_, b, _) = train_two(tmp_path, 1, **options)
    for x, y, z in zip(*map(jax.tree.leaves, (a.params, b.params, a.opt_state.z)), strict=True):
        assert x.dtype == jnp.bfloat16
        np.testing.assert_array_equal(x, y)
        assert np.isfinite(np.asarray(z, np.float32)).all()
    moved = [np.abs(x - y).max() for x, y in zip(whole(a.params), whole(model), strict=True)]
    assert min(moved) > 0.01


@pytest.mark.parametrize("late", ["drop", "carry:0.5"])
def test_late_progress_is_dropped_or_carried(late, tmp_path, said):
    """One island sleeps through a round; plain SGD of rate 1 makes anchors the islands' means."""
    options: dict[str, Any] = {"outer_optimizer": optax.sgd(1.0), "late": late}
    options["deadline_seconds"] = 0.1  # the late one then waits for the other one
    island, other = (
        js.islands.join(str(tmp_path), name=name, sync_every=1, **options)
        for name in ("late", "other")
    )
    step = js.make_train_step(loss, optax.sgd(0.0), mesh=js.virtual_mesh({"replica": 1}))
    state = step.init(params())

    def shifted(state: Any, by: float) -> Any:
        return state._replace(params=jax.tree.map(lambda x: x + by, state.params))

    mine, theirs = island.exchange(state), other.exchange(state)
    theirs = other.exchange(shifted(theirs, 1.0))  # alone, it closes the round
    mine = island.exchange(shifted(mine, 4.0))
    share = {"drop": 0.0, "carry:0.5": 0.5}[late]
    start = np.asarray(params()["w"])
    np.testing.assert_allclose(mine.params["w"][0], start + 1.0 + 4.0 * share, rtol=1e-6)
    mine = island.exchange(shifted(mine, 2.0))  # now it is alone
    np.testing.assert_allclose(mine.params["w"][0], start + 3.0 + 4.0 * share, rtol=1e-6)
    assert any("closed without late" in line for line in said)


def test_report_and_status_tell_bytes_requests_and_who(tmp_path):
    (_, _, a), (_, _, b) = train_two(tmp_path, 1, quorum=2, periods=4)
    report, size = a.report(), 4 * (6 * 3 + 3)
    assert report.rounds == 4
    assert size <= report.received <= size + 1500
    # Four parts, and before them what one of the two began the run with.
    assert report.sent_to_join + 4 * report.sent == a.bytes_sent > 4 * size
    assert a.bytes_sent + b.bytes_sent > 9 * size
    assert {"get", "put", "list"} <= report.requests.keys()
    assert "4 rounds, on average " in str(report)
    status = js.islands.status(str(tmp_path))
    assert (status.round, [x.name for x in status.islands]) == (4, ["a", "b"])
    assert [(x.round, x.lag, x.updates) for x in status.islands] == [(4, 0, 16)] * 2
    assert all(size <= x.sent <= size + 1500 for x in status.islands)
    assert str(status).count("\n") == 3


ARGUMENTS = [
    ({"name": "a/b"}, "`name` must be up to 64 letters"),
    ({"codec": "int8"}, "`codec` must be one of js.codecs"),
    ({"outer_optimizer": optax.clip_by_global_norm(1.0)}, "element-wise .* 'reduce_sum'"),
    ({"url": "ftp://x/y"}, "`url` must be a folder or begin with s3"),
    ({"delay": 500}, "`delay` must be less than the updates between two exchanges"),
]


@pytest.mark.parametrize(("wrong", "message"), ARGUMENTS)
def test_wrong_arguments_are_named(wrong, message, tmp_path):
    options = {"url": str(tmp_path), "name": "one"} | wrong
    with pytest.raises(ValueError, match=message):
        js.islands.join(**options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sync_every": 5}, "`sync_every` of this run is 4, and this island has 5: join with "),
        ({"outer_optimizer": optax.sgd(0.5)}, "`outer_optimizer` of this run is .*: give all "),
        ({"model": {"w": np.zeros((6, 2), np.float32)}}, r"the model of this run is .*w\[6,3\]"),
    ],
)
def test_an_island_of_another_kind_is_refused(change, message, tmp_path):
    train(tmp_path, "one", slice(0, 1), periods=1)
    with pytest.raises(IslandsError, match=message):
        train(tmp_path, "two", slice(0, 1), periods=0, **change)


def test_a_state_of_another_run_and_a_name_in_use_are_refused(tmp_path):
    _, state, island = train(tmp_path / "a", "one", slice(0, 1), periods=1)
    train(tmp_path / "b", "one", slice(0, 1), periods=1)
    with pytest.raises(IslandsError, match=r"of the run [0-9a-f]{8}\.\.\., .* holds [0-9a-f]{16}"):
        train(tmp_path / "b", "one", slice(0, 1), start=lambda step: state)
    train(tmp_path / "a", "one", slice(0, 1), periods=0)
    with pytest.raises(IslandsError, match="another process has joined as 'one'"):
        island.exchange(state)
    with pytest.raises(IslandsError, match="there is no run here"):
        js.islands.status(str(tmp_path / "c"))


def test_states_that_islands_do_not_take_are_refused(tmp_path):
    island = js.islands.join(str(tmp_path), name="one")
    step = js.make_train_step(
        loss, optax.sgd(0.1), mesh=js.virtual_mesh({"replica": 2}), sync="none"
    )
    state = step.init(params())
    wide: Any = {"w": np.zeros((2, 3), np.float64)}
    with pytest.raises(ValueError, match="at most 32 bits, not so: w"):
        island.exchange(state._replace(params=wide))
    with pytest.raises(ValueError, match="has tables, which islands do not exchange"):
        island.exchange(state._replace(params=js.embedding.WithTables(state.params, {})))
