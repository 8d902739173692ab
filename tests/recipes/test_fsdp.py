"""Replicas sharded inside: the step and a loop of one's own agree, and move blocks."""

import re

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from recipes.doc_blocks import DOCS, LOOP, MAPPED, SETTING, run, sections

TITLE = "FSDP by jit and NamedSharding"


def unspecified():
    return js.slowmo("replica", base=js.local_sgd("replica", sync_every=3), sync_every=6)


def recipe():
    return run("recipes", SETTING, LOOP, MAPPED, TITLE)


def test_the_loop_the_step_and_whole_leaves_agree():
    found = recipe()
    whole = js.make_train_step(
        found["autoencoder_loss"],
        optax.adam(1e-2),
        sync=unspecified(),
        mesh=js.virtual_mesh({"replica": 2}),
    )
    state = whole.init(jax.tree.map(np.asarray, found["sharded"]))
    for batch in found["inputs"]:
        state, _ = whole(state, batch)
    for name, leaf in state.params.items():
        for other in (found["fsdp_state"].params[name], found["stacked"][name]):
            np.testing.assert_allclose(other, leaf, rtol=1e-4, atol=1e-5)


def test_parameters_moments_and_consensus_stay_sharded():
    found = recipe()
    for name, spec in found["specs"].items():
        inside = [
            found["fsdp_state"].params[name],
            found["stacked"][name],
            found["fsdp_state"].opt_state[1][0].mu[name],
            found["state"][0][0].mu[name],
        ]
        for leaf in inside:
            wanted = NamedSharding(found["fsdp_mesh"], P("replica", *spec))
            assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim), (name, leaf.sharding)
        one = NamedSharding(found["fsdp_mesh"], spec)
        assert found["model"][name].sharding.is_equivalent_to(one, found["model"][name].ndim)


def slow_bytes(found):
    """Of the exchanges of a slow step between replicas, per device."""
    batch = jax.device_put(found["inputs"][0], NamedSharding(found["fsdp_mesh"], P("replica")))
    lowered = found["own_fsdp_step"].lower(found["stacked"], found["state"], batch)
    report = js.comm_report_of(lowered, compile=False)
    return {r.collective: r.bytes for r in report.select(axis="replica", kind="slow")}


def test_bytes_are_those_of_the_page():
    found, pages = recipe(), (DOCS / "recipes" / "fsdp.md").read_text("utf-8")
    without = {**found, "fsdp_sync": unspecified}
    with pytest.warns(UserWarning, match="slowmo: no `param_specs` were given"):
        exec(sections("recipes")[TITLE][1], without)
    said = [int(n.replace(",", "")) for n in re.findall(r"([\d,]+) bytes", pages)]
    sent = [slow_bytes(each) for each in (found, without)]
    assert sent == [{"reduce-scatter": n, "all-gather": n} for n in said[:2]]
    jax.tree.map(np.testing.assert_array_equal, without["stacked"], found["stacked"])
