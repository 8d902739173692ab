"""Replicas sharded inside: the step and a loop of one's own agree, and move blocks."""

import re

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from recipes.doc_blocks import DOCS, LOOP, MAPPED, SETTING, of_recipe, run, sections

TITLE = "FSDP by jit and NamedSharding"
pytestmark = of_recipe(TITLE)


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


def test_a_jit_step_becomes_replicas_of_each_algorithm():
    """All learn; what keeps the jit step, under vmap, is local_sgd to rounding."""
    own_jit = recipe()
    one = {
        name: js.consensus(s.params, mesh=s.params["in"].sharding.mesh)
        for name, s in own_jit["trained"].items()
    }
    loss = own_jit["autoencoder_loss"]
    first = float(loss(own_jit["sharded"], own_jit["inputs"][0]))
    for name, model in [("jit", own_jit["params"]), *one.items()]:
        assert float(loss(model, own_jit["inputs"][0])) < first, name
        assert model["in"].sharding.spec == P("fsdp"), name
    for name, leaf in own_jit["kept_params"].items():
        expected = own_jit["trained"]["local_sgd"].params[name]
        np.testing.assert_allclose(leaf, expected, rtol=1e-4, atol=1e-5)


def compiled(fn, *args):
    """Bytes by kind of step and axis."""
    found = {}
    for row in js.comm_report(fn, *args).select(level="compiled"):
        key = row.kind, row.axis
        found[key] = found.get(key, 0) + row.bytes
    return found


def test_what_each_way_costs():
    """The step gathers nothing where it averages; under vmap each average gathers leaves."""
    own_jit = recipe()
    batch = jax.device_put(own_jit["inputs"][0], own_jit["rows"])
    step, state = own_jit["steps"]["local_sgd"], own_jit["trained"]["local_sgd"]
    by_step = compiled(step, state, batch)
    kept = own_jit["kept_params"], *own_jit["kept_state"], own_jit["stacked_batch"]
    by_vmap = compiled(own_jit["kept_step"], *kept)
    assert by_step["average", "replica"] == 4352
    assert by_step["average", "fsdp"] == by_step["local", "fsdp"] < by_vmap["local", "fsdp"]
    assert ("local", "replica") not in by_step
    assert by_vmap["average", "fsdp"] > 1.5 * by_step["average", "fsdp"]
    page = (DOCS / "recipes" / "fsdp.md").read_text("utf-8")
    assert f"| {by_step['local', 'fsdp']:,} |" in page


def test_a_gpt_by_rules_trains_as_a_whole_one():
    found = recipe()
    whole = js.make_train_step(
        found["gpt_loss_fn"](found["gpt"]),
        optax.adam(1e-2),
        sync=js.slowmo("replica", base=js.local_sgd("replica", sync_every=2), sync_every=4),
        mesh=js.virtual_mesh({"replica": 2}),
    )
    state = whole.init(found["init_gpt"](found["gpt"]))
    for batch in found["text"]:
        state, _ = whole(state, batch)
    for a, b in zip(*map(jax.tree.leaves, (found["gpt_state"].params, state.params)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    kernel = found["gpt_state"].params["blocks"][0]["expand"]["kernel"]
    assert kernel.sharding.spec == P("replica", "fsdp", "tensor")
