"""Stages with programs of their own: losses, gradients and steps are those of the whole model."""

import gc
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.pipeline.host._dispatch import Pass
from support.layered import language_model, tokens

SCHEDULES = {
    "gpipe": js.schedules.gpipe,
    "one_f_one_b": js.schedules.one_f_one_b,
    "interleaved": lambda p, m: js.schedules.interleaved(p, m, 2),
    "zero_bubble": js.schedules.zero_bubble,
    "zero_bubble_2": lambda p, m: js.schedules.zero_bubble(p, m, memory=2),
    "zbv": js.schedules.zbv,
}
MESHES = {
    "stage": {"stage": 2},
    "replica": {"replica": 2, "stage": 2},
    "replica inside": {"stage": 2, "replica": 2},
    "data": {"replica": 2, "stage": 2, "fsdp": 2},
    "four": {"replica": 2, "stage": 4},
    "tensor": {"replica": 2, "stage": 2, "tensor": 2},
}


def close(got: Any, expected: Any, tolerance: float = 1e-5) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def norm(grads: Any) -> float:
    return float(np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(grads))))


def check_gradients(
    kind: str,
    axes: dict[str, int],
    *,
    tied: bool = False,
    remat: bool = False,
    num_blocks: int = 6,
) -> None:
    """Losses, metrics, gradients and their norms of every replica, against the whole model."""
    model, params = language_model(num_blocks, tied=tied)
    schedule = SCHEDULES[kind](axes["stage"], 4)
    data_axes = [name for name in axes if name == "fsdp"]
    mesh = js.make_mesh(axes)
    pipe = js.pipeline.HostPipeline(
        model, params, schedule, mesh=mesh, data_axes=data_axes, remat=remat
    )
    replicas = axes.get("replica", 1)
    batch = tokens(replicas * 8)
    placed = pipe.place(params)
    (losses, metrics), grads = pipe.value_and_grad(placed, batch)
    close(pipe.evaluate(placed, batch), {"loss": losses, **metrics})
    whole = jax.jit(jax.value_and_grad(model, has_aux=True))
    for replica in range(replicas):
        own = jax.tree.map(lambda x, r=replica: x[8 * r : 8 * (r + 1)], batch)
        expected, expected_grads = whole(params, own)
        found = jax.tree.map(lambda x, r=replica: np.asarray(x)[r], ((losses, metrics), grads))
        close(found, (expected, expected_grads))
        np.testing.assert_allclose(norm(found[1]), norm(expected_grads), rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "axes", "tied", "remat"),
    [
        ("one_f_one_b", "replica", False, False),
        ("zero_bubble", "data", True, False),
        ("zbv", "stage", True, True),
    ],
)
def test_gradients_are_those_of_the_whole_model(
    kind: str, axes: str, tied: bool, remat: bool
) -> None:
    check_gradients(kind, MESHES[axes], tied=tied, remat=remat, num_blocks=3)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "axes", "tied", "remat"),
    list(itertools.product(SCHEDULES, MESHES, [False, True], [False, True])),
)
def test_gradients_of_all_kinds(kind: str, axes: str, tied: bool, remat: bool) -> None:
    sizes = MESHES[axes]
    if kind in ("interleaved", "zbv") and sizes["stage"] == 4:
        sizes = {**sizes, "stage": 2}  # two chunks each
    check_gradients(kind, sizes, tied=tied, remat=remat)


def trained(step: Any, state: Any, steps: int) -> tuple[Any, list[float]]:
    losses = []
    for t in range(steps):
        state, metrics = step(state, tokens(16, seed=t))
        losses.append(np.asarray(metrics["loss"]))
    return state, losses


def test_twenty_steps_of_slowmo_are_those_of_the_whole_model() -> None:
    model, params = language_model(2, tied=False)
    sync = js.slowmo("replica", base=js.local_sgd("replica", sync_every=2), sync_every=6)
    clipped = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.02))
    flat = js.make_mesh({"replica": 2})
    step = js.make_train_step(model, clipped, sync=sync, mesh=flat)
    whole, losses = trained(step, step.init(params), 20)

    mesh = js.make_mesh({"replica": 2, "stage": 2})
    schedule = js.schedules.zero_bubble(2, 4)
    pipe = js.pipeline.HostPipeline(model, params, schedule, mesh=mesh, max_norm=0.5)
    state = pipe.init(js.chain(optax.adam(0.02), sync), params)
    found, found_losses = trained(pipe.step, state, 20)

    assert int(found.step) == 20
    close(found_losses, losses)
    close(found.params, whole.params)
    close(pipe.consensus(found.params), js.consensus(whole.params, mesh=flat))
    # Adam's momenta, too, which differ between replicas.
    momenta = [
        jax.tree.leaves(layer) for of_stage in found.opt_state for layer in of_stage[0][0].mu
    ]
    close(momenta, [jax.tree.leaves(layer) for layer in whole.opt_state[1][1][0].mu])

    with pytest.raises(ValueError, match="the buffers of layer 0 are gone: this state was given"):
        pipe.step(state, tokens(16))


share_a_pipeline = pytest.mark.xdist_group("clipping pipeline")


@pytest.fixture(scope="module")
def clipping() -> tuple[js.pipeline.HostPipeline, list[Any]]:
    """A tied model with clipping and a check, and its parameters."""
    model, params = language_model(2)
    pipe = js.pipeline.HostPipeline(
        model,
        params,
        js.schedules.one_f_one_b(2, 2),
        mesh=js.make_mesh({"replica": 2, "stage": 2}),
        max_norm=1e-3,
        only_finite=True,
        donate=False,
    )
    return pipe, params


@share_a_pipeline
def test_tied_leaves_count_once_in_the_norm(clipping: Any) -> None:
    pipe, params = clipping
    state = pipe.init(optax.sgd(1.0), params)
    batch = tokens(8)
    _, metrics = pipe.step(state, batch)
    whole = jax.jit(jax.grad(lambda p, own: pipe.model(p, own)[0]))
    for replica in range(2):
        own = jax.tree.map(lambda x, r=replica: x[4 * r : 4 * (r + 1)], batch)
        grads = whole(params, own)
        expected = norm([*grads[:-1]])  # the head is the embedding
        np.testing.assert_allclose(metrics["gradient_norm"][replica], expected, rtol=1e-5)
    after, _ = pipe.step(state, batch)
    new, old = (jax.tree.map(np.asarray, s.params[:-1]) for s in (after, state))
    moved = jax.tree.map(lambda a, b: (a - b)[0], new, old)
    np.testing.assert_allclose(norm(moved), 1e-3, rtol=1e-3)
    close(after.params[0]["table"], after.params[-1]["table"], 0)


@share_a_pipeline
def test_one_bad_value_on_one_stage_skips_everywhere(clipping: Any) -> None:
    pipe, params = clipping
    state = pipe.init(optax.sgd(0.1, momentum=0.9), params)
    broken = [*state.params]
    # Of replica 1, in the last stage's head.
    broken[3] = {"table": broken[3]["table"].at[1, 0, 0].set(jnp.nan)}
    after, metrics = pipe.step(state._replace(params=broken), tokens(8))
    assert not np.isfinite(metrics["loss"][1])
    assert np.isfinite(metrics["loss"][0])
    close(after.params, broken)
    close(after.opt_state, state.opt_state)
    after, _ = pipe.step(state, tokens(8))
    assert np.any(after.params[0]["table"] != state.params[0]["table"])


@share_a_pipeline
def test_nothing_is_left_behind_by_a_step(clipping: Any) -> None:
    pipe, params = clipping
    state = pipe.init(optax.sgd(0.1), params)
    counts = []
    for t in range(3):
        state, metrics = pipe.step(state, tokens(8, seed=t))
        jax.block_until_ready((state, metrics))
        del metrics
        gc.collect()
        counts.append(len(jax.live_arrays()))
    assert counts[1] == counts[2]


@pytest.mark.parametrize(("kind", "held"), [("gpipe", 8), ("one_f_one_b", 2)])
def test_a_stash_is_let_go_when_its_microbatch_is_done(
    kind: str, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, params = language_model(2, tied=False)
    pipe = js.pipeline.HostPipeline(
        model, params, SCHEDULES[kind](2, 8), mesh=js.make_mesh({"stage": 2})
    )
    most = 0
    dispatch = Pass._do

    def watched(self: Pass, operation: Any) -> Any:
        nonlocal most
        made = dispatch(self, operation)
        most = max(most, sum(stage == 0 for stage, _ in self._stash))
        return made

    monkeypatch.setattr(Pass, "_do", watched)
    pipe.value_and_grad(pipe.place(params), tokens(8))
    assert most == held == pipe.schedule.stash[0]


def test_half_precision_is_summed_in_float32() -> None:
    model = js.LayeredModel(
        [lambda p, batch: p["w"] * batch["x"], lambda p, x: x], lambda x, batch: jnp.mean(x)
    )
    params = [{"w": jnp.ones((), jnp.bfloat16)}, {}]
    schedule = js.schedules.gpipe(2, 8)
    pipe = js.pipeline.HostPipeline(model, params, schedule, mesh=js.make_mesh({"stage": 2}))
    # In bfloat16 each of the small ones would be lost beside 1.
    x = jnp.array([1.0] + [2.0**-9] * 7, jnp.bfloat16)
    _, grads = pipe.value_and_grad(pipe.place(params), {"x": x})
    assert grads[0]["w"].dtype == jnp.bfloat16
    assert float(grads[0]["w"][0]) == (1 + 2**-6) / 8


def noisy(p: Any, x: jax.Array, *, key: Any = None) -> jax.Array:
    return x if key is None else x * jax.random.bernoulli(key, 0.5, x.shape) * 2


def test_layers_draw_from_keys_of_their_microbatch() -> None:
    base, params = language_model(1, tied=False)
    model = js.LayeredModel([base.layers[0], noisy, *base.layers[1:]], base.loss)
    params = [params[0], {}, *params[1:]]
    pipe = js.pipeline.HostPipeline(
        model, params, js.schedules.zero_bubble(2, 2), mesh=js.make_mesh({"stage": 2})
    )
    batch, rng = tokens(4), jax.random.key(3)
    (value, _), grads = pipe.value_and_grad(pipe.place(params), batch, rng=rng)

    def whole(p: Any) -> jax.Array:
        halves = [jax.tree.map(lambda x, i=i: x[2 * i : 2 * i + 2], batch) for i in range(2)]
        keys = [jax.random.fold_in(rng, i) for i in range(2)]
        return sum(model(p, b, rng=k)[0] for b, k in zip(halves, keys, strict=True)) / 2

    expected, expected_grads = jax.jit(jax.value_and_grad(whole))(params)
    close(value[0], expected)
    close(jax.tree.map(lambda x: np.asarray(x)[0], grads), expected_grads)


class Passed(NamedTuple):
    value: dict[str, jax.Array]
    mask: jax.Array
    step: jax.Array


def masked(p: Any, batch: Any) -> Passed:
    return Passed({"a": batch["x"] @ p["w"]}, batch["mask"], jnp.int32(1))


def doubled(p: Any, x: Passed) -> Passed:
    a = x.value["a"] * p["s"] * x.mask[:, None]
    return Passed({"a": a, "b": jnp.sin(x.value["a"])}, x.mask, x.step + 1)


def test_stages_may_pass_on_anything_on_explicit_meshes_too() -> None:
    model = js.LayeredModel(
        [masked, doubled, lambda p, x: (x.value["a"] + x.value["b"]) @ p["w"] * x.step],
        lambda out, batch: jnp.mean((out - batch["y"]) ** 2),
    )
    draw = np.random.default_rng(0).normal
    params = [{"w": draw(size=(3, 4))}, {"s": np.ones(4)}, {"w": draw(size=(4, 2))}]
    params = jax.tree.map(jnp.float32, params)
    batch = {"x": np.float32(draw(size=(8, 3))), "mask": np.arange(8) % 3 > 0}
    batch["y"] = np.float32(draw(size=(8, 2)))
    mesh = jax.make_mesh((3,), ("stage",), devices=jax.devices()[:3])
    pipe = js.pipeline.HostPipeline(model, params, js.schedules.zero_bubble(3, 4), mesh=mesh)
    found = pipe.value_and_grad(pipe.place(params), batch)
    expected = jax.jit(jax.value_and_grad(model))(params, batch)
    close(jax.tree.map(lambda x: np.asarray(x)[0], found), expected, 1e-4)


def test_only_what_a_stage_reads_is_moved_to_it() -> None:
    model, params = language_model(2, tied=False)
    pipe = js.pipeline.HostPipeline(
        model, params, js.schedules.gpipe(2, 2), mesh=js.make_mesh({"stage": 2})
    )
    batch = {**tokens(4), "unread": np.zeros((4, 3))}  # leaves by name: next, tokens, unread
    programs, feed = pipe._prepared(batch, None)
    assert [program.reads for program in programs] == [(False, True, False), (True, False, False)]
    moved, _ = feed(0, 1)
    np.testing.assert_array_equal(moved[0], batch["tokens"][2:])
    assert moved[0].devices() == {jax.devices()[0]}


def test_errors_name_argument_rule_and_value() -> None:
    model, params = language_model(2, tied=False)
    schedule = js.schedules.gpipe(2, 2)
    mesh = js.make_mesh({"replica": 2, "stage": 2})

    def refused(message: str, schedule: Any = schedule, **change: Any) -> None:
        with pytest.raises(ValueError, match=message):
            js.pipeline.HostPipeline(model, params, schedule, **{"mesh": mesh, **change})

    refused("axis 'stage' .* of the size 3 of the schedule's stages", js.schedules.gpipe(3, 2))
    refused("axis 'pipe' .* got a mesh with 'replica'", axis_name="pipe")
    refused("`mesh` must be a jax.sharding.Mesh", mesh=js.virtual_mesh({"stage": 2}))
    refused("`data_axes` must name axes of `mesh` .* got 'fsdp'", data_axes=("fsdp",))
    refused("a stage without layers", parts=[[[0, 0]], [[0, 4]]])
    refused("every stage needs a layer of its own", js.schedules.interleaved(2, 2, 3))
    refused("`max_norm` must be a number > 0, got 0", max_norm=0)
    refused("`max_norm` must be a number > 0, got '1'", max_norm="1")
    refused("`data_axes` must name axes of `mesh` .* got 'fsdp'", data_axes="fsdp")
    refused("`parts` must have 1 .* got \\[2, 2\\]", parts=[2, 2])
    refused("`schedule` must be a js.pipeline.Schedule .* got 'gpipe'", "gpipe")
    with pytest.raises(ValueError, match=r"`model` must be a js\.LayeredModel, .* got list"):
        js.pipeline.HostPipeline([], params, schedule, mesh=mesh)
    with pytest.raises(ValueError, match="real floating-point leaves only"):
        js.pipeline.HostPipeline(
            model, [{"table": jnp.arange(3)}, *params[1:]], schedule, mesh=mesh
        )

    refused("`param_specs` must be a list of one tree .* or a prefix", param_specs=[{"a": P()}] * 4)
    pipe = js.pipeline.HostPipeline(model, params, schedule, mesh=mesh, param_specs=P())
    placed = pipe.place(params)
    with pytest.raises(ValueError, match=r"`params` of layer 0 must be .*float32.* got .*bfloat16"):
        pipe.place(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    with pytest.raises(ValueError, match="one tree per layer, 4 of them, got 2"):
        pipe.value_and_grad(placed[:2], tokens(4))
    with pytest.raises(ValueError, match=r"`tx` must be an optax.* got 'sgd'"):
        pipe.init("sgd", params)
    with pytest.raises(ValueError, match="6 examples of `batch` must divide by 4: 2 replicas"):
        pipe.value_and_grad(placed, tokens(6))
    with pytest.raises(ValueError, match="must have one leading dimension"):
        pipe.value_and_grad(placed, {"a": np.ones(4), "b": np.ones(2)})
    with pytest.raises(ValueError, match="layer 0 must be stacked for 2 replicas"):
        pipe.value_and_grad(params, tokens(4))
    with pytest.raises(ValueError, match=r"call that first"):
        pipe.step(js.HostState(0, placed, []), tokens(4))
    forward = js.pipeline.HostPipeline(
        model, params, js.schedules.gpipe(2, 2, forward_only=True), mesh=mesh
    )
    with pytest.raises(ValueError, match="holds forward operations only"):
        forward.value_and_grad(placed, tokens(4))
    close(forward.evaluate(placed, tokens(4)), pipe.evaluate(placed, tokens(4)))


def test_devices_of_other_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, params = language_model(2, tied=False)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with pytest.raises(ValueError, match="must lie on the devices of this one process"):
        js.pipeline.HostPipeline(
            model, params, js.schedules.gpipe(2, 2), mesh=js.make_mesh({"stage": 2})
        )
