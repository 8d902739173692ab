"""Options for the compiler: what is refused, and which programs are compiled with them."""

import re

import jax
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support.layered import language_model, tokens
from train.step.problem import BATCHES, KINDS, PARAMS, loss
from train.step.tables import DENSE, batches, step_of


def make_step(mesh, options, **arguments):
    sync = js.local_sgd("replica", sync_every=2)
    return js.make_train_step(
        loss, optax.sgd(0.1), sync=sync, mesh=mesh, compiler_options=options, **arguments
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["xla_dump_to"], r"must be a mapping .*, got \['xla_dump_to'\]"),
        ("xla_dump_to=/tmp", r"must be a mapping .*, got 'xla_dump_to=/tmp'"),
        ({"": 1}, r"a name must be .* got ''"),
        ({2: 1}, r"a name must be .* got 2"),
        ({"--xla_dump_to": "/tmp"}, r"without dashes in front, .* got '--xla_dump_to'"),
        ({"xla_dump_to": None}, r"the value of 'xla_dump_to' must be a str, .* got None"),
        ({"xla_dump_to": ["/tmp"]}, r"the value of 'xla_dump_to' must be a str, .* got \['/tmp'\]"),
        ({"xla_gpu_enable_latency_hiding_scheduler": True}, "is an option for GPUs, .* has CPUs"),
        ({"xla_tpu_detect_nan": True}, "'xla_tpu_detect_nan' is an option for TPUs, .* has CPUs"),
        ({"xla_jf_crs_combiner_threshold_count": 1}, "is an option for TPUs, .* has CPUs"),
    ],
)
def test_bad_options_are_refused_at_construction(kind, options, message):
    mesh = KINDS[kind]({"replica": 4})
    with pytest.raises(ValueError, match=f"`compiler_options`.*{message}"):
        make_step(mesh, options)


@pytest.mark.parametrize("kind", KINDS)
def test_none_are_recommended_for_cpus(kind):
    assert js.recommended_compiler_options(KINDS[kind]({"replica": 4})) == {}


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_compiler_does_not_know_is_reported_at_the_first_compile(kind):
    step = make_step(KINDS[kind]({"replica": 4}), {"xla_no_such_option": 1})
    state = step.init(PARAMS)
    with pytest.raises(RuntimeError, match="No such compile option: 'xla_no_such_option'"):
        step(state, BATCHES[0])
    step = make_step(KINDS[kind]({"replica": 4}), {"xla_cpu_enable_fast_math": "perhaps"})
    with pytest.raises(RuntimeError, match="xla_cpu_enable_fast_math, 'perhaps' is not a valid"):
        step(state, BATCHES[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_with_options_stays_outside_of_programs(kind):
    mesh = KINDS[kind]({"replica": 4})
    step = make_step(mesh, {"xla_cpu_enable_fast_math": False}, donate=False)
    state = step.init(PARAMS)
    inside = {
        "step": lambda: jax.jit(step)(state, BATCHES[0]),
        "scan": lambda: jax.lax.scan(step, state, BATCHES[:2]),
        "batch alone": lambda: jax.jit(lambda x: step.evaluate(state, x))(BATCHES[0]),
    }
    step(state, BATCHES[0])  # a program that is there already is refused, too
    for run in inside.values():
        with pytest.raises(ValueError, match=r"`compiler_options` cannot .* inside of jax\.jit"):
            run()
    for options in (None, {}):
        jax.jit(make_step(mesh, options))(state, BATCHES[0])


class Dump:
    """A folder to which the compiler writes every program that has the option `xla_dump_to`."""

    def __init__(self, path):
        self._path, self._seen = path, set()
        self.options = {"xla_dump_to": str(path)}

    def new(self):
        """Return the names of the programs that were compiled since the last call, sorted."""
        names = {path.name for path in self._path.glob("*.before_optimizations.txt")}
        new, self._seen = names - self._seen, names
        return sorted(re.sub(r"^module_\d+\.|\.before_\w+\.txt$", "", name) for name in new)


@pytest.fixture
def dump(tmp_path):
    return Dump(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["traced", "host"])
def test_every_program_of_a_step_is_compiled_with_them(kind, mode, dump):
    options = dict(dump.options)
    step = make_step(KINDS[kind]({"replica": 4}), options, mode=mode)
    options.clear()  # the step keeps what it was given
    state = step.init(PARAMS)
    assert dump.new() == []
    for program in ([1, 1, 0], [1, 0, 0])[mode == "traced"]:
        state, _ = step(state, BATCHES[0])
        assert dump.new() == ["jit_program"] * program
    step.evaluate(state, BATCHES[0])
    assert dump.new() == ["jit_program"]
    window, _ = step.collect(state, BATCHES[0])
    assert dump.new() == ["jit_program"] * 2  # one opens the window
    state, _ = step.apply(state, window)
    assert dump.new() == ["jit_program"]


def test_reports_read_the_programs_that_run(dump):
    step = make_step(js.make_mesh({"replica": 4}), dump.options, mode="host")
    state = step.init(PARAMS)
    step.compiled(state, BATCHES[0])
    assert dump.new() == ["jit_program"]
    js.comm_report(step, state, BATCHES[0])
    assert dump.new() == ["jit_program"]  # of the other phase; the first is there


def test_lookups_ahead_are_compiled_with_them(dump):
    gradients = js.all_reduce_gradients("replica")
    step = step_of(2, gradients=gradients, compiler_options=dump.options)
    state, (first, second) = step.init(DENSE), batches(2)
    ahead = step.ahead("patched")
    dump.new()
    asked = ahead.prime(state, first)
    assert dump.new() == ["jit_program"]
    ahead(state, first, asked, second)
    assert dump.new() == ["jit_program"]


def test_programs_that_the_host_dispatches_are_compiled_with_them(dump):
    model, params = language_model(2)
    mesh, schedule = js.make_mesh({"replica": 2, "stage": 2}), js.schedules.one_f_one_b(2, 2)
    pipe = js.pipelined(model, params, schedule, mesh=mesh, executor="host")
    plain, step = (
        js.make_train_step(pipe, optax.sgd(0.1), sync="none", mesh=mesh, compiler_options=options)
        for options in (None, dump.options)
    )
    batch = tokens(16)
    plain_state, _ = plain(plain.init(params), batch)  # another step has programs of its own
    assert dump.new() == []
    state, _ = step(step.init(params), batch)
    # Of each stage: its leaves, sums of zero, F and BW; and the end of the pass. The step's own
    # are the arguments of the loss function and the update.
    assert dump.new() == ["jit_per_device"] * 9 + ["jit_program"] * 2
    for a, b in zip(*map(jax.tree.leaves, (state.params, plain_state.params)), strict=True):
        np.testing.assert_array_equal(a, b)
