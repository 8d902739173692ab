"""Options for the compiler: every program of a step is compiled with them, once."""

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
    with pytest.raises(ValueError, match="`compiler_options`"):
        jax.lax.scan(step, state, BATCHES[:2])


@pytest.mark.parametrize(("kind", "mode"), [("auto", "host"), ("virtual", "traced")])
def test_every_program_of_a_step_is_compiled_with_them(kind, mode, tmp_path):
    """The compiler writes every program that has the option to a folder."""

    def count():
        return len(list(tmp_path.glob("*jit_program*.before_optimizations.txt")))

    step = make_step({"xla_dump_to": str(tmp_path)}, kind, mode=mode)
    state, phases = step.init(PARAMS), 2 if mode == "host" else 1
    assert count() == 0
    js.comm_report(step, state, BATCHES[0])  # reads the programs that run
    for _ in range(3):
        state, _ = step(state, BATCHES[0])
    assert count() == phases
    step.evaluate(state, BATCHES[0])
    window, _ = step.collect(state, BATCHES[0])
    step.apply(state, window)
    assert count() == phases + 4  # one opens the window
