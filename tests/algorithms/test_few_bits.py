"""Outer exchanges in few bits: what is applied, what replicas remember, and what travels."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxslowmo as js
from support.executions import lift
from support.few_bits import CODECS

R = 4
SHAPES = {"a": (9, 31), "b": (300,), "c": (5, 2, 20)}
SGD = optax.sgd(1.0)


def tree(seed: int, scale: float = 1.0, lead: tuple[int, ...] = ()) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {k: np.float32(scale * rng.normal(size=(*lead, *s))) for k, s in SHAPES.items()}


def start() -> dict[str, jax.Array]:
    return {k: jnp.broadcast_to(v, (R, *v.shape)) for k, v in tree(0).items()}


class Run:
    """An algorithm in a loop over stacked replicas, which tells what its state holds."""

    def __init__(self, tx, execution="vmap"):
        self.tx = tx
        program = lambda fn, stacks: lift(fn, {"replica": R}, execution, stacks)  # noqa: E731
        self.state = program(tx.init, (False,))(start())
        self.params = start()
        self._step = program(self._one, (False,) * 4)
        self._anchor = program(tx.anchor, (False,) * 2)

    def _one(self, params, state, moves, weight):
        updates, state = self.tx.update(moves, state, params, weight=weight)
        return optax.apply_updates(params, updates), state

    def step(self, moves, weight=None):
        weight = np.ones(R, np.float32) if weight is None else np.float32(weight)
        self.params, self.state = self._step(self.params, self.state, moves, weight)

    def anchor(self):
        """Return the anchor, float64; equal on all replicas."""
        found = {k: np.float64(v) for k, v in self._anchor(self.state, self.params).items()}
        assert all(np.ptp(v, axis=0).max() == 0 for v in found.values())
        return {k: v[0] for k, v in found.items()}

    @property
    def sent(self):
        """Return what replicas remember of what they have sent."""
        return self.state.local["sent"]

    def residual(self):
        """Return what replicas have not sent, by leaf, stacked; zeros without error feedback."""
        zeros = {k: np.zeros((R, *s)) for k, s in SHAPES.items()}
        return {k: np.float64(x) for k, x in (self.sent.residual or zeros).items()}

    def starts(self):
        """Return from where replicas measure, by leaf."""
        reference = self.sent.reference
        if not reference:
            return self.anchor()
        assert all(np.ptp(x, axis=0).max() == 0 for x in reference.values())
        return {k: np.float64(x[0]) for k, x in reference.items()}


def mean(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    total = weight.sum()
    return np.tensordot(weight, x, 1) / total if total else np.zeros_like(x[0])


@settings(max_examples=5)
@given(
    codec=st.sampled_from([*CODECS]),
    shard_state=st.booleans(),
    fragments=st.sampled_from([1, 3]),
    delay=st.sampled_from([0, 1, 3]),
    merge=st.sampled_from([0.0, 0.4]),
    seed=st.integers(0, 9),
)
def test_what_was_applied_and_what_is_remembered_is_what_was_displaced(
    codec, shard_state, fragments, delay, merge, seed
):
    """For each fragment, over all of its slow steps; the outer optimizer applies D itself."""
    tx = js.diloco(
        "replica", sync_every=12, outer_optimizer=SGD, codec=CODECS[codec](), delay=delay,
        shard_state=shard_state, fragments=(lambda name: "abc".index(name)) if fragments > 1 else 1,
        merge=merge,
    )  # fmt: skip
    run, rng = Run(tx), np.random.default_rng(seed)
    turns = {name: ("abc".index(name) + 1) * 4 % 12 if fragments > 1 else 0 for name in "abc"}
    displaced = {k: np.zeros(s) for k, s in SHAPES.items()}
    for t in range(1, 37):
        moves = tree(100 * seed + t, 1e-2, (R,))
        # Without any data nothing is displaced, and nothing is lost of what is remembered.
        weight = (t not in (20, 23, 24)) * rng.integers(0, 3, R).astype(np.float32)
        before, starts = run.params, run.starts()
        run.step(moves, weight)
        for name, turn in turns.items():
            if (t + delay) % 12 == turn and t + delay <= 36:
                y = np.float64(before[name]) + moves[name]
                displaced[name] += mean(starts[name] - y, weight)
    residual, anchor = run.residual(), run.anchor()
    for name, first in tree(0).items():
        applied = np.float64(first) - anchor[name]
        np.testing.assert_allclose(
            applied + residual[name].mean(0), displaced[name], atol=2e-6, err_msg=name
        )
        assert np.abs(displaced[name]).max() > 1e-2
        # A reduce-scatter sends what the replicas do not divide as it is.
        is_exact = shard_state and not delay and name == "a"
        assert np.any(residual[name] != 0) == (not is_exact)


@pytest.mark.parametrize(("codec", "off"), [("int8", 0.02), ("bits2", 0.6)])
def test_a_sharded_anchor_is_exact_and_replicas_follow_it(codec, off):
    """Owners sum what was sent; what replicas have of the anchor is off by what one step loses."""
    options = {"sync_every": 2, "outer_optimizer": optax.sgd(0.7, momentum=0.9, nesterov=True)}
    runs = [
        Run(js.diloco("replica", codec=c, shard_state=True, **options))
        for c in (None, CODECS[codec]())
    ]
    for t in range(1, 17):
        for run in runs:
            run.step(tree(t, 1e-2, (R,)))
    (exact, coded), params = [run.anchor() for run in runs], runs[1].params
    reference = runs[1].sent.reference
    for name in SHAPES:
        assert np.ptp(reference[name], axis=0).max() == 0
        np.testing.assert_allclose(params[name], reference[name], rtol=0, atol=1e-6)
        moved = np.abs(exact[name] - tree(0)[name]).mean()
        assert np.abs(np.float64(reference[name][0]) - exact[name]).mean() < off * moved
        assert np.abs(coded[name] - exact[name]).mean() < off * moved


INT8 = js.codecs.int8()


def test_what_is_not_finite_is_forgotten():
    run = Run(js.diloco("replica", sync_every=1, shard_state=True, codec=INT8))
    run.step({k: np.full_like(v, np.nan) for k, v in tree(1, 1.0, (R,)).items()})
    assert all(np.all(np.isfinite(v)) for v in jax.tree.leaves(run.sent.residual))


def test_a_base_measures_from_where_a_slow_step_left_it():
    """Its averages and slow steps in the same and in other updates, with and without a codec."""
    found = []
    for codec in (None, INT8):
        base = js.local_sgd("replica", sync_every=2, codec=codec)
        run = Run(js.slowmo("replica", base=base, sync_every=6, momentum=0.7))
        for t in range(1, 13):
            run.step(tree(t, 1e-2, (R,)))
        found.append(np.concatenate([np.ravel(v[0]) for v in run.params.values()]))
    moved = np.abs(found[0] - np.concatenate([v.ravel() for v in tree(0).values()])).mean()
    assert np.abs(found[1] - found[0]).mean() < 0.02 * moved
