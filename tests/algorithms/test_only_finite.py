"""`js.only_finite`: equal to the transform inside, until a replica is no longer finite."""

import jax
import numpy as np
import optax
import pytest

import jaxslowmo as js

INNER = {
    "local_sgd": lambda: js.local_sgd("replica", sync_every=2),
    "slowmo over sgp": lambda: js.slowmo("replica", base=js.sgp("replica"), sync_every=4),
    "diloco": lambda: js.diloco("replica", sync_every=2),
}
# Due in the next two updates after eight.
DUE = {"local_sgd": (0, 1), "slowmo over sgp": (1, 2), "diloco": (0, 1)}


def trained(sync, mesh, mode, steps=8):
    step = js.make_train_step(
        lambda params, batch: (params["w"] * batch).sum(), optax.sgd(0.1), sync=sync, mesh=mesh,
        mode=mode, donate=False,
    )  # fmt: skip
    state = step.init({"w": np.ones(3, np.float32)})
    random = np.random.default_rng(0)
    for _ in range(steps):
        state, _ = step(state, random.normal(size=(4, 3)).astype(np.float32))
    return step, state


@pytest.mark.parametrize("name", INNER)
@pytest.mark.parametrize(
    ("mesh", "mode"),
    [(js.virtual_mesh({"replica": 4}), "traced"), (js.make_mesh({"replica": 4}), "host")],
    ids=["virtual", "devices"],
)
def test_only_finite(name, mesh, mode):
    step, state = trained(js.only_finite(INNER[name]()), mesh, mode)
    _, plain = trained(INNER[name](), mesh, mode)
    # Another program may round differently.
    np.testing.assert_allclose(state.params["w"], plain.params["w"], rtol=1e-6)
    assert not np.any(state.opt_state[-1].refused)

    batch = np.zeros((4, 3), np.float32)
    batch[2] = np.nan  # its gradient, too
    for refused in DUE[name]:
        state, _ = step(state, batch)
        assert np.asarray(state.opt_state[-1].refused).tolist() == [refused] * 4
        assert np.isnan(state.params["w"]).any(1).tolist() == [False, False, True, False]


def test_what_it_sends():
    def report(sync):
        step, state = trained(sync, js.make_mesh({"replica": 4}), "host", steps=0)
        batch = jax.ShapeDtypeStruct((4, 3), np.float32)
        programs = {k: t.lower() for k, t in step.traced_by_phase(state, batch).items()}
        return js.comm_report_of(programs, mesh=step.mesh, compile=False)

    plain, checked = (
        report(sync) for sync in (INNER["diloco"](), js.only_finite(INNER["diloco"]()))
    )
    for kind, more in {"local": 0, "slow": 1}.items():
        assert checked.count(kind=kind) == plain.count(kind=kind) + more
        assert checked.bytes(kind=kind) == plain.bytes(kind=kind) + 4 * more


def test_bad_input():
    with pytest.raises(ValueError, match=r"`inner` must be a js.ParameterTransform"):
        js.only_finite(optax.sgd(0.1))
