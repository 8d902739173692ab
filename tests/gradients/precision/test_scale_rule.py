"""The scale against a scaler in plain Python, over any pattern of overflows."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxslowmo.gradients.precision._loss_scale import Scale, ScaleRule

DEFAULTS = {
    "initial": 2.0**16,
    "growth_interval": 2000,
    "growth": 2.0,
    "backoff": 0.5,
    "hysteresis": 1,
    "min_scale": 1.0,
    "max_scale": 2.0**24,
}


def expected(options, pattern):
    """(scale, growth count, hysteresis left) after each update, as ColossalAI's scaler has them."""
    scale, count, left = np.float32(options["initial"]), 0, options["hysteresis"]
    found = []
    for overflow in pattern:
        if overflow:
            count, left = 0, left - 1
            if left <= 0:
                scale = max(
                    scale * np.float32(options["backoff"]), np.float32(options["min_scale"])
                )
        else:
            count += 1
            if count == options["growth_interval"]:
                count, left = 0, options["hysteresis"]
                if scale < options["max_scale"]:
                    scale = scale * np.float32(options["growth"])
        found.append((scale, count, max(left, 0)))
    return found


@functools.cache
def compiled(**options):
    rule = ScaleRule(**options)

    def step(state, overflow):
        state = rule.after(state, overflow)
        return state, state

    return jax.jit(lambda pattern: jax.lax.scan(step, rule.start(), pattern)[1])


def run(options, pattern):
    return compiled(**options)(np.asarray(pattern, bool))


# Interval, hysteresis, growth, backoff, least and largest scale.
RULES = [
    (1, 1, 2.0, 0.5, 1.0, 64.0),
    (2, 1, 3.0, 0.3, 8.0, 24.0),
    (3, 1, 1.5, 0.9, 1e-30, 1e30),
    (1, 2, 3.0, 0.3, 1.0, 64.0),
    (2, 2, 2.0, 0.5, 1e-30, 1e30),
    (3, 3, 2.0, 0.5, 8.0, 24.0),
    (2, 3, 1.5, 0.9, 16.0, 16.0),
]


@given(st.lists(st.booleans(), min_size=24, max_size=24), st.sampled_from(RULES))
def test_any_pattern(pattern, rule):
    names = ("growth_interval", "hysteresis", "growth", "backoff", "min_scale", "max_scale")
    options = {"initial": 16.0, **dict(zip(names, rule, strict=True))}
    found = run(options, pattern)
    want = Scale(*map(np.asarray, zip(*expected(options, pattern), strict=True)))
    np.testing.assert_allclose(found.scale, want.scale, rtol=1e-6)
    np.testing.assert_array_equal(found.growth_count, want.growth_count)
    np.testing.assert_array_equal(found.hysteresis_left, want.hysteresis_left)
    assert found.scale.dtype == np.float32
    assert np.isfinite(found.scale).all()
    assert (found.scale > 0).all()


def test_an_overflow_does_not_restore_the_hysteresis():
    options = DEFAULTS | {"hysteresis": 2, "growth_interval": 3}
    scales = run(options, [1, 0, 1, 1, 0, 0, 0, 1, 1]).scale
    # The second overflow lowers the scale and so does the third; growth restores both.
    np.testing.assert_array_equal(np.log2(scales), [16, 16, 15, 14, 14, 14, 15, 15, 14])


def test_bounds_of_float32_are_never_left():
    tiny, huge = 2.0**-126, 2.0**126
    options = DEFAULTS | {
        "initial": 1.0,
        "growth_interval": 1,
        "min_scale": tiny,
        "max_scale": huge,
    }
    for overflow, end in ((True, tiny), (False, huge)):
        assert run(options, [overflow] * 300).scale[-1] == end


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("growth_interval", 0, "int >= 1"),
        ("growth_interval", 2.5, "int >= 1"),
        ("hysteresis", True, "int >= 1"),
        ("growth", 1.0, "> 1"),
        ("growth", float("nan"), "> 1"),
        ("backoff", 1.0, r"in \(0, 1\)"),
        ("backoff", 0, r"in \(0, 1\)"),
        ("min_scale", 0.0, "> 0"),
        ("min_scale", 2.0**17, "between"),
        ("max_scale", 3.4e38, "finite"),
        ("max_scale", 2.0**15, "between"),
        ("initial", float("inf"), "between"),
        ("initial", "large", "a number"),
    ],
)
def test_errors(name, value, rule):
    with pytest.raises(ValueError, match=f"`{name}`.*{rule}|{rule}.*`{name}`"):
        ScaleRule(**DEFAULTS | {name: value})
