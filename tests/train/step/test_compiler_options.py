"""Options for the compiler: every program of a step is compiled with them, once."""

import re

import jax
import optax
import pytest

import jaxslowmo as js
from train.step.problem import BATCHES, KINDS, PARAMS, loss


def make_step(options, kind="virtual", **arguments):
    sync, mesh = js.local_sgd("replica", sync_every=2), KINDS[kind]({"replica": 4})
    return js.make_train_step(
        loss, optax.sgd(0.1), sync=sync, mesh=mesh, compiler_options=options, **arguments
    )


def test_a_step_with_options_stays_outside_of_programs():
    step = make_step({"xla_cpu_enable_fast_math": False}, donate=False)
    state = step.init(PARAMS)
    step(state, BATCHES[0])  # a program that is there already is refused, too
    for run in (
        lambda: jax.jit(step)(state, BATCHES[0]),
        lambda: jax.lax.scan(step, state, BATCHES[:2]),
        lambda: jax.jit(lambda x: step.evaluate(state, x))(BATCHES[0]),
    ):
        with pytest.raises(ValueError, match="`compiler_options`"):
            run()
    jax.eval_shape(make_step({}), state, BATCHES[0])


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


@pytest.mark.parametrize(("kind", "mode"), [("auto", "host"), ("virtual", "traced")])
def test_every_program_of_a_step_is_compiled_with_them(kind, mode, dump):
    options, is_host = dict(dump.options), mode == "host"
    step = make_step(options, kind, mode=mode)
    options.clear()  # the step keeps what it was given
    state = step.init(PARAMS)
    assert dump.new() == []
    if is_host:  # reports read the programs that run
        step.compiled(state, BATCHES[0])
        assert dump.new() == ["jit_program"]
        js.comm_report(step, state, BATCHES[0])
        assert dump.new() == ["jit_program"]  # of the other phase; the first is there
    for program in (not is_host, 0, 0):
        state, _ = step(state, BATCHES[0])
        assert dump.new() == ["jit_program"] * program
    step.evaluate(state, BATCHES[0])
    assert dump.new() == ["jit_program"]
    window, _ = step.collect(state, BATCHES[0])
    assert dump.new() == ["jit_program"] * 2  # one opens the window
    state, _ = step.apply(state, window)
    assert dump.new() == ["jit_program"]
