"""Processes whose settings differ are told which, on all of them, before anything is sent."""

import ast

import jax
import numpy as np
import optax
import pytest

import jaxslowmo as js
from jaxslowmo._support.settings import described, text_of
from support.pairs import two_processes

PROGRAM = """
import jax.numpy as jnp
import numpy as np
import optax
import jaxslowmo as js

mesh = js.make_mesh({"replica": 2})
loss = lambda p, batch: ((batch @ p["w"]) ** 2).mean()
stateful = lambda p, batch, *, model_state: (loss(p, batch), ({}, model_state))
params = {"w": np.ones(3, np.float32)}
average, every = (js.local_sgd("replica", sync_every=k) for k in (2, 1))
two = js.slowmo("replica", base=average, sync_every=4)
decayed = lambda rate: optax.adamw(optax.linear_schedule(rate, 0.0, 100), weight_decay=0.1)
gradients = js.all_reduce_gradients("replica", hook=js.hooks.int8())
smaller = js.hooks.int8(block_size=128)
# What the second process is given instead.
cases = {
    "equal": ({}, {}),
    "period": ({}, {"sync": js.slowmo("replica", base=average, sync_every=8)}),
    "base": ({}, {"sync": js.slowmo("replica", base=every, sync_every=4)}),
    "algorithm": ({}, {"sync": js.diloco("replica", sync_every=4)}),
    "whole": ({}, {"sync": js.slowmo("replica", base=average, shard_state=False, sync_every=4)}),
    "codec": (
        {"sync": js.local_sgd("replica", codec=js.codecs.bfloat16())},
        {"sync": js.local_sgd("replica", codec=js.codecs.float16())},
    ),
    "hook": (
        {"sync": None, "gradients": gradients},
        {"sync": None, "gradients": js.all_reduce_gradients("replica", hook=smaller)},
    ),
    "rate": ({"optimizer": decayed(0.1)}, {"optimizer": decayed(0.2)}),
    "optimizer": ({}, {"optimizer": optax.adam(0.1)}),
    "mode": ({}, {"mode": "host"}),
    "in a chain": (
        {"sync": None, "optimizer": js.chain(js.clip_by_global_norm(1.0), optax.sgd(0.1), two)},
        {"sync": None, "optimizer": js.chain(js.clip_by_global_norm(2.0), optax.sgd(0.1), two)},
    ),
    "seed": ({}, {"seed": 1}),
    "model_state": ({"model_state": {"m": np.zeros(2)}}, {"model_state": {"m": np.ones(2)}}),
    "params": ({}, {"params": {"w": np.zeros(3, np.float32)}}),
}
found = {}
for name, both in cases.items():
    options = {"optimizer": optax.sgd(0.1), "sync": two, "params": params, **both[rank]}
    initial = {key: options.pop(key) for key in ("seed", "model_state") if key in options}
    start = options.pop("params")
    step = js.make_train_step(stateful if "model_state" in initial else loss, mesh=mesh, **options)
    try:
        step.init(start, **initial)
        found[name] = None
    except ValueError as error:
        found[name] = str(error)
print(found, flush=True)
"""
# What the message names, and what it does not.
NAMED = {
    "equal": None,
    "period": "`sync`.sync_every",
    "base": "`sync`.base.sync_every: 2 on process 0, 1 on process 1",
    "algorithm": "`sync`: slowmo on process 0, diloco on process 1",
    "whole": "`sync`.shard_state",
    "codec": "`sync`.codec",
    "hook": "`gradients`.hook",
    "rate": "`optimizer`",
    "optimizer": "`optimizer`",
    "mode": "`mode`: 'traced' on process 0, 'host' on process 1",
    "in a chain": "`optimizer`.transforms[0].max_norm: 1.0 on process 0, 2.0 on process 1",
    "seed": "`seed`: 0 on process 0, 1 on process 1",
    "model_state": "model_state: ",
    "params": "params: ",
}


@pytest.mark.usefixtures("quick_processes")
def test_two_processes_compare_their_settings(tmp_path):
    first, second = map(ast.literal_eval, two_processes(PROGRAM, tmp_path))
    assert first == second
    assert first.keys() == NAMED.keys()
    for name, wanted in NAMED.items():
        if wanted is None:
            assert first[name] is None
        else:
            assert wanted in first[name], first[name]
            others = {"`sync`", "`optimizer`", "`gradients`", "`mode`", "params: "}
            assert not any(x in first[name] for x in others if not wanted.startswith(x))


def texts(value):
    return dict(described("x", value, lambda _: None))


def test_a_text_tells_values_apart_and_equal_ones_not():
    def scaled(by):
        return lambda x: x * by

    alike = [
        (scaled(2.0), scaled(2.0)),
        ({"b": 1, "a": {"z", "y"}}, {"a": {"y", "z"}, "b": 1}),
        (np.arange(3), np.arange(3)),
        (js.every(4, start=2), js.every(4, start=2)),
        (js.codecs.float16(), js.codecs.float16()),
        (jax.sharding.PartitionSpec("a"), jax.sharding.PartitionSpec("a")),
    ]
    for one, other in alike:
        assert texts(one) == texts(other)
    values = [one for one, _ in alike]
    values += [scaled(3.0), {"a": 1}, np.arange(4), js.every(4, start=3), js.codecs.bfloat16()]
    values += [None, True, 1, 1.0, "1", (1,), [1], optax.sgd, np.float32]
    every = [str(texts(value)) for value in values]
    assert len(set(every)) == len(every)
    assert text_of(object()) == "builtins.object"
