"""Flags are True or False, whatever public function has them; scalars of libraries are numbers."""

import inspect
import types

import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js
import jaxslowmo.checkpoint

MODULES = [
    js, js.checkpoint, js.codecs, js.embedding, js.hooks, js.islands, js.reports, js.schedules,
    js.sparse, js.spec,
]  # fmt: skip
PUBLIC = [
    getattr(module, name) for module in MODULES for name in dir(module) if not name.startswith("_")
]
FUNCTIONS = {x for x in PUBLIC if isinstance(x, types.FunctionType)}
CLASSES = {js.TrainPipeline, js.train.Evaluate, js.checkpoint.Checkpoints}
FLAGS = {
    f"{function.__module__}.{function.__name__}, {name}": (function, name, x.annotation is not bool)
    for function in FUNCTIONS | CLASSES
    for name, x in inspect.signature(function).parameters.items()
    if x.annotation in (bool, bool | None)
}


def test_flags_are_found():
    found = {(function.__name__, flag) for function, flag, _ in FLAGS.values()}
    assert {("diloco", "shard_state"), ("int8", "stochastic_rounding")} <= found
    assert len(FLAGS) > 25


@pytest.mark.parametrize("of", sorted(FLAGS))
def test_another_value_is_refused_by_name(of):
    function, flag, takes_none = FLAGS[of]
    rule = "True, False or None" if takes_none else "True or False"
    with pytest.raises(ValueError, match=rf"{function.__name__}: `{flag}` must be {rule}, got"):
        function(**{flag: 1})


@pytest.mark.parametrize("number", [np.float16(0.5), np.array(0.5), jnp.float32(0.5)])
def test_scalars_of_libraries_are_numbers(number):
    for make in (js.rowwise_adagrad, lambda x: js.rowwise_adam(0.1, b1=x, eps=x), js.codecs.top_k):
        assert make(number) == make(0.5)
    assert js.diloco("replica", merge=number) is not None
    for wrong in ("0.5", True, np.True_, np.array([0.5]), np.float32("nan"), 1j, None):
        with pytest.raises(ValueError, match="rowwise_sgd: `learning_rate` must be a number >= 0"):
            js.rowwise_sgd(wrong)
        with pytest.raises(ValueError, match="diloco: `merge` must be a number"):
            js.diloco("replica", merge=wrong)
