"""Settings as texts, which processes compare: `test_two_processes.py` has what they say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxslowmo as js
from jaxslowmo.train.step._first_run import describe_value, program_lines


def texts(value):
    return dict(describe_value(value))


def scaled(by):
    return lambda x: x * by


def test_a_text_tells_values_apart_and_equal_ones_not():
    alike = [
        (scaled(2.0), scaled(3.0)),  # a function is known by its name
        (functools.partial(scaled, 2.0), functools.partial(scaled, 2.0)),
        ({"b": 1, "a": {"z", "y"}}, {"a": {"y", "z"}, "b": 1}),
        (np.arange(3), np.arange(3)),
        (js.every(4, start=2), js.every(4, start=2)),
        (js.codecs.float16(), js.codecs.float16()),
        (js.clip_by_global_norm(1.0), js.clip_by_global_norm(1.0)),
    ]
    for one, other in alike:
        assert texts(one) == texts(other)
    values = [one for one, _ in alike]
    values += [scaled, functools.partial(scaled, 3.0), {"a": 1}, np.arange(4), js.every(4, start=3)]
    values += [js.codecs.bfloat16(), js.clip_by_global_norm(2.0), jax.jit(texts)]
    values += [None, True, 1, 1.0, "1", (1,), [1], optax.sgd, np.float32]
    every = [str(texts(value)) for value in values]
    assert len(set(every)) == len(every)


def test_a_program_is_known_by_its_equations_and_its_constants():
    """Also those of inner programs, and without the addresses that its text holds."""

    def lines(rate, table, weights=1.0):
        weigh = jax.jit(lambda x: x * weights)

        @jax.custom_jvp
        def f(x):
            return x + 1

        f.defjvps(lambda t, y, x: t)

        def program(x):
            return jax.lax.scan(
                lambda s, x: (s + (weigh(f(x)) * table).sum() * rate, None), 0.0, x
            )[0]

        return program_lines("p", jax.jit(program).trace(jnp.ones(3)))

    one = lines(0.1, np.arange(4.0))
    assert one == lines(0.1, np.arange(4.0))
    assert one.keys() == {"equations of p", "constants of p"}

    def differing(other):
        return {name for name in one if one[name] != other[name]}

    assert differing(lines(0.2, np.arange(4.0))) == {"equations of p"}
    assert differing(lines(0.1, jnp.arange(4.0) + 1)) == {"constants of p"}
