"""Measured steps on devices: what was found is what ran."""

import json
from dataclasses import asdict

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxlib import xla_client

import jaxslowmo as js
from jaxslowmo.reports import Bucket, KindOfStep, StepReport, StepTimes

BATCH = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
PARAMS = {"c": np.eye(8, dtype=np.float32), "a": np.eye(8, dtype=np.float32)}


def loss(params, batch):
    return jnp.mean(jnp.tanh(jnp.tanh(batch @ params["a"]) @ params["c"]) ** 2)


def run(num_steps, rate, **options):
    mesh = js.make_mesh({"replica": 4})
    step = js.reports.measured(
        js.make_train_step(loss, optax.sgd(0.1), mesh=mesh, **options), rate=rate
    )
    state = step.init(PARAMS)
    losses = [
        float(np.mean(r.metrics["loss"]))
        for r in js.train_loop(step, state, [BATCH] * num_steps, num_steps=num_steps)
    ]
    return step.report(), losses


def check_times(times):
    for name, seconds in asdict(times).items():
        values = seconds.values() if isinstance(seconds, dict) else [seconds]
        assert all(value >= 0 for value in values), name
    assert 0 < times.forward_compute_time < times.step_time
    assert 0 < times.backward_compute_time < times.step_time
    assert times.backward_overlap_time <= times.overlap_time <= times.communication_time


def test_gradient_buckets():
    report, losses = run(
        12, 12, gradients=js.all_reduce_gradients("replica", first_bucket_bytes=0, bucket_bytes=0)
    )
    assert losses[-1] < losses[0]
    assert (report.iteration, report.measured, report.missed) == (12, (*range(1, 11), 12), ())
    check_times(report.last)
    check_times(report.average)
    assert set(report.average.communication) == {"gradients"}
    assert report.last.communication["gradients"] == report.last.communication_time > 0
    assert {name: (k.steps, k.measured) for name, k in report.kinds.items()} == {"every": (12, 11)}

    assert [(b.size_bytes, b.leaves) for b in report.buckets] == [(256, ("c",)), (256, ("a",))]
    assert report.bucket_sizes == (256, 256)
    assert report.ready_order == ("c", "a")
    assert (report.num_parameter_tensors, report.parameter_bytes) == (2, 512)
    assert (report.dtypes, report.backend, report.num_devices) == (("float32",), "cpu", 4)


def test_parameter_synchronisations():
    sync = js.slowmo("replica", base=js.local_sgd("replica", sync_every=2), sync_every=4)
    report, _ = run(14, 100, sync=sync, mode="host")
    assert report.measured == (*range(1, 11), 12, 14)  # exchanges are counted by themselves
    counts = {name: (kind.steps, kind.measured) for name, kind in report.kinds.items()}
    assert counts == {"local": (7, 5), "average": (4, 4), "slow": (3, 3)}
    for name, kind in report.kinds.items():
        check_times(kind.times)
        exchanges = {} if name == "local" else {name: kind.times.communication_time}
        assert kind.times.communication == exchanges
        assert (kind.times.communication_time > 0) == (name != "local")
    assert report.buckets == ()
    found = [(b.exchange, b.size_bytes, b.leaves) for b in report.sync_buckets]
    assert sorted(found) == [("average", 512, ("a", "c")), ("slow", 512, ("a", "c"))]


def test_the_table_and_the_file_of_a_report(tmp_path):
    times = StepTimes(0.010, 0.001, 0.002, 0.0005, 0.004, 0.003, 0.002, {"slow": 0.004})
    buckets = tuple(Bucket("gradients", size, "float32", ("a",)) for size in (2**20, 10485))
    kinds = {"local": KindOfStep(29, 6, times), "slow": KindOfStep(1, 0, StepTimes())}
    of_steps = (30, 10, (1, 2, 3, 10, 20, 21), (30,), times, times, kinds)
    report = StepReport(*of_steps, buckets, (), None, 2**21, 3, ("float32", "bfloat16"), "cpu", 4)
    lines = [" ".join(line.split()) for line in str(report).splitlines()]
    assert lines[:2] == ["30 steps, 6 measured; 4 cpu devices", "due but not measured: 1"]
    assert {
        "step 10.000 10.000",
        "while computing 3.000 3.000",
        "of slow 4.000 4.000",
        "local 29 6 10.000 4.000 1.000",
        "slow 1 0 - - -",
        "3 parameters, 2 MiB, float32, bfloat16",
        "buckets of gradients: 1 MiB, 10485 B",
    } <= {*lines}
    report.write(tmp_path / "report.json")
    expected = asdict(report) | {"bucket_sizes": (2**20, 10485)}
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(json.dumps(expected))


def test_while_another_trace_runs_steps_are_missed(tmp_path):
    step = js.reports.measured(jax.jit(lambda x: 2 * x), rate=1)
    with jax.profiler.trace(str(tmp_path)), pytest.warns(UserWarning, match="another trace"):
        assert step(np.float32(3)) == 6
    with pytest.raises(TypeError):
        step("no array")
    assert step(np.float32(4)) == 8  # the trace was stopped
    assert (step.report().measured, step.report().missed) == ((3,), (1,))


def test_no_crash_where_libtpu_is_loaded_without_a_tpu(monkeypatch):
    """There the profiler would end the process."""
    monkeypatch.setattr(xla_client, "pjrt_plugin_loaded", lambda platform: platform == "tpu")
    step = js.reports.measured(jax.jit(lambda x: x + 1))
    with pytest.warns(UserWarning, match="libtpu"):
        assert step(jnp.ones(())) == 2
    assert step.report().missed == (1,)
