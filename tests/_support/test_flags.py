"""Flags are True or False, whatever public function has them; scalars of libraries are numbers."""

import inspect
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
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
    for value in ("no", 0, 1):
        with pytest.raises(ValueError, match=rf"{function.__name__}: `{flag}` must be {rule}, got"):
            function(**{flag: value})


@pytest.mark.parametrize("weight", [-1, np.float32(-1), np.array(-1), np.float32("nan"), np.inf])
def test_a_weight_that_is_known_is_checked(weight):
    tx, x = js.local_sgd("replica"), np.ones((2, 3), np.float32)

    def step(x):
        return tx.update(x, tx.init(x), x, weight=weight)

    with pytest.raises(ValueError, match="local_sgd: `weight` must be >= 0 and finite"):
        jax.vmap(step, axis_name="replica")(x)


def test_those_of_numpy_are_those_of_python():
    assert js.codecs.int8(error_feedback=np.False_) == js.codecs.int8(error_feedback=False)
    sync = js.diloco("replica", shard_state=np.False_)
    step = js.make_train_step(
        lambda params, batch: params["w"].sum() + batch.sum(), optax.sgd(0.1),
        mesh=js.virtual_mesh({"replica": 2}), sync=sync,
    )  # fmt: skip
    state = step.init({"w": np.zeros((4, 2), np.float32)})
    (anchor,) = jax.tree.leaves(state.exchange.shared["anchor"])
    assert anchor.shape == (4, 2)
    assert not step.sync.algorithm.is_sharded


@pytest.mark.parametrize(
    "number", [np.float32(0.5), np.float16(0.5), np.array(0.5), jnp.float32(0.5)]
)
def test_scalars_of_libraries_are_numbers(number):
    for make in (
        js.rowwise_sgd,
        js.rowwise_adagrad,
        js.rowwise_adam,
        lambda x: js.rowwise_adam(0.1, b1=x, eps=x, weight_decay=x),
        js.codecs.top_k,
    ):
        assert make(number) == make(0.5)
    assert js.diloco("replica", merge=number) is not None
    for wrong in ("0.5", True, np.True_, np.array([0.5]), np.float32("nan"), 1j, None):
        with pytest.raises(ValueError, match="rowwise_sgd: `learning_rate` must be a number >= 0"):
            js.rowwise_sgd(wrong)
        with pytest.raises(ValueError, match="diloco: `merge` must be a number"):
            js.diloco("replica", merge=wrong)
