"""Tests that both executors of a pipeline behave alike, and as the model without stages."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.checkpoint import Checkpoints, export_consensus, load_consensus
from support.layered import assert_close, language_model, tokens

REPLICAS, STAGES, MICROBATCHES = 2, 2, 2
ONE_F_ONE_B = js.schedules.one_f_one_b(STAGES, MICROBATCHES)


def exhaustive(value: Any) -> Any:
    return pytest.param(value, marks=pytest.mark.exhaustive)


def is_matrix(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, tree)


def dropout_layer(params: Any, x: jax.Array, *, key: Any = None) -> jax.Array:
    return x if key is None else x * jax.random.bernoulli(key, 0.5, x.shape) * 2


def model_with_dropout() -> tuple[js.LayeredModel, list[Any]]:
    model, params = language_model(2)
    layers = [model.layers[0], dropout_layer, *model.layers[1:3], dropout_layer, model.layers[3]]
    tied = [((0, "table"), (5, "table"))]
    return js.LayeredModel(layers, model.loss, tied=tied), [
        params[0],
        {},
        *params[1:3],
        {},
        params[3],
    ]


def slowmo() -> Any:
    return js.slowmo("replica", base=js.local_sgd("replica", sync_every=2), sync_every=4)


@pytest.fixture(params=["one_program", "host"])
def executor(request: pytest.FixtureRequest) -> str:
    return request.param


class TestBothExecutors:
    """Tests of a step with stages, on each executor."""

    model, params = language_model(2)

    def pipe(self, executor: str, model: Any = None, params: Any = None, **options: Any) -> Any:
        axes = options.pop("axes", {"replica": REPLICAS, "stage": STAGES})
        schedule = options.pop("schedule", ONE_F_ONE_B)
        return js.pipelined(
            model or self.model,
            params or self.params,
            schedule,
            mesh=js.make_mesh(axes),
            executor=executor,
            **options,
        )

    def step(self, pipe: Any, optimizer: Any, **options: Any) -> Any:
        if "sync" not in options and "gradients" not in options:
            options["sync"] = slowmo()
        return js.make_train_step(pipe, optimizer, mesh=pipe.mesh, **options)

    def whole_step(self, optimizer: Any, model: Any = None, **options: Any) -> Any:
        if "sync" not in options and "gradients" not in options:
            options["sync"] = slowmo()
        mesh = js.virtual_mesh({"replica": REPLICAS})
        return js.make_train_step(model or self.model, optimizer, mesh=mesh, **options)

    def state_and_metrics(
        self, step: Any, params: Any = None, weights: Any = None, steps: int = 6
    ) -> Any:
        state, losses = step.init(params or self.params), []
        for t in range(steps):
            weight = None if weights is None else weights[t]
            state, metrics = step(state, tokens(16, seed=t), weight)
            losses.append(jax.tree.map(np.asarray, metrics))
        return state, losses

    def assert_equal_without_stages(
        self, executor: str, optimizer: Any, whole: Any = None, **options: Any
    ) -> None:
        """Raise unless six steps with stages equal six without."""
        weights = options.pop("weights", None)
        step = self.step(self.pipe(executor), optimizer, **options)
        whole_step = self.whole_step(whole or optimizer, **options)
        state, metrics = self.state_and_metrics(step, weights=weights)
        expected, expected_metrics = self.state_and_metrics(whole_step, weights=weights)
        assert_close(metrics, expected_metrics)
        assert_close(step.consensus(state), whole_step.consensus(expected))

    def test_clipping_counts_tied_leaves_once(self, executor: str) -> None:
        once = [None, None, None, {"table": np.zeros(self.params[0]["table"].shape)}]
        self.assert_equal_without_stages(
            executor,
            js.chain(js.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9)),
            js.chain(js.clip_by_global_norm(0.1, counted=once), optax.sgd(0.1, momentum=0.9)),
        )

    def test_masks_see_the_leaves_of_the_model(self, executor: str) -> None:
        self.assert_equal_without_stages(
            executor, optax.adamw(0.02, weight_decay=0.3, mask=is_matrix)
        )

    def test_host_mode_with_late_validation_trains_as_without_stages(self, executor: str) -> None:
        clipped = js.chain(js.clip_by_global_norm(10.0), optax.adam(0.02))
        self.assert_equal_without_stages(executor, clipped, mode="host", validate="after")

    def test_batches_are_accumulated(self, executor: str) -> None:
        self.assert_equal_without_stages(executor, optax.adam(0.02), accumulate=2)

    def test_an_idle_replica_follows_the_others(self, executor: str) -> None:
        weights = [np.array([1.0, t % 2], np.float32) for t in range(6)]
        gradients = js.all_reduce_gradients("replica")
        self.assert_equal_without_stages(
            executor, optax.adam(0.02), gradients=gradients, weights=weights
        )

    def test_rates_are_changed_from_outside(self, executor: str) -> None:
        optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
        sync = js.slowmo(
            "replica", sync_every=3, learning_rate="optimizer", base=js.local_sgd("replica")
        )
        self.assert_equal_without_stages(executor, optimizer, sync=sync)

    def test_the_loss_reaches_optimizers_that_want_it(self, executor: str) -> None:
        plateau = optax.contrib.reduce_on_plateau(patience=1, rtol=1.0)
        self.assert_equal_without_stages(executor, optax.chain(optax.sgd(0.1), plateau))

    def test_gossip_with_a_policy_trains_as_without_stages(self, executor: str) -> None:
        options = {"sync": js.sgp("replica"), "policy": js.Policy("bfloat16", keep=("tokens",))}
        step = self.step(self.pipe(executor), optax.sgd(0.1), **options)
        whole_step = self.whole_step(optax.sgd(0.1), **options)
        (state, metrics), (expected, wanted) = (
            self.state_and_metrics(step),
            self.state_and_metrics(whole_step),
        )
        assert_close(metrics, wanted, 0.03)
        assert_close(step.consensus(state), whole_step.consensus(expected), 0.03)

    def test_an_overflow_skips_the_update_on_all_stages(self, executor: str) -> None:
        scaled = js.dynamic_loss_scale(optax.adam(0.02), initial=2.0**126, max_scale=2.0**126)
        gradients = js.all_reduce_gradients("replica")
        self.assert_equal_without_stages(executor, scaled, gradients=gradients)

    def test_a_bad_value_of_one_replica_is_left_out(self, executor: str) -> None:
        step = self.step(
            self.pipe(executor, axes={"replica": 2, "stage": 2}),
            js.dynamic_loss_scale(optax.sgd(0.1, momentum=0.9), initial=1.0),
            gradients=js.all_reduce_gradients("replica"),
            donate=False,
        )
        state = step.init(self.params)
        broken = jax.tree.map(lambda x: x.at[1, -1, 0].set(jnp.nan), state.params)
        after, metrics = step(state._replace(params=broken), tokens(16))
        assert not np.isfinite(metrics["loss"][1])
        assert np.isfinite(metrics["loss"][0])
        np.testing.assert_array_equal(metrics["skipped_updates"], [1, 1])
        jax.tree.map(np.testing.assert_array_equal, after.params, broken)

    @pytest.mark.parametrize("accumulate", [exhaustive(1), 2])
    def test_layers_draw_the_same_keys(self, executor: str, accumulate: int) -> None:
        """Dropout equals that of one program, in training, evaluation and windows."""
        model, params = model_with_dropout()

        def results(executor: str) -> Any:
            pipe = self.pipe(executor, model, params)
            step = self.step(pipe, optax.adam(0.02), accumulate=accumulate)
            state, metrics = self.state_and_metrics(step, params, steps=3)
            window, first = step.collect(state, tokens(16, seed=7))
            state, second = step(state, tokens(16, seed=8), window=window)
            return metrics, first, second, step.evaluate(state, tokens(16)), step.consensus(state)

        actual = results(executor)
        assert_close(actual, results("one_program"))
        assert actual[0][0]["loss"].shape == (REPLICAS,)
        plain = self.step(self.pipe(executor, model, params), optax.adam(0.02))
        one, other = (plain(plain.init(params, seed=s), tokens(16))[1]["loss"] for s in (0, 1))
        assert not np.allclose(one, other)

    def test_keys_are_those_of_the_microbatches(self, executor: str) -> None:
        model, params = model_with_dropout()
        pipe = self.pipe(executor, model, params, axes={"stage": STAGES})
        rng, batch = jax.random.key(3), tokens(4)
        value, grads = jax.value_and_grad(pipe, has_aux=True)(params, batch, rng=rng)

        def by_hand(params: Any) -> Any:
            halves = [jax.tree.map(lambda x, i=i: x[2 * i : 2 * i + 2], batch) for i in range(2)]
            each = [model(params, b, rng=jax.random.fold_in(rng, i)) for i, b in enumerate(halves)]
            return jax.tree.map(lambda *x: sum(x) / 2, *each)

        assert_close((value, grads), jax.value_and_grad(by_hand, has_aux=True)(params))

    def test_windows_of_batches_become_one_update(self, executor: str) -> None:
        def updated(step: Any) -> Any:
            state = step.init(self.params)
            window, first = step.collect(state, tokens(16, seed=1))
            window, _ = step.collect(state, tokens(16, seed=2), window=window)
            state, second = step(state, tokens(16, seed=3), window=window)
            window, _ = step.collect(state, tokens(16, seed=4))
            state, third = step.apply(state, window)
            return first, second, third, step.evaluate(state, tokens(16)), step.consensus(state)

        assert_close(
            updated(self.step(self.pipe(executor), optax.adam(0.02))),
            updated(self.whole_step(optax.adam(0.02))),
        )

    @pytest.mark.parametrize("inside", ["split by the step", "split by the pipeline", "fsdp"])
    def test_devices_inside_a_stage_share_the_batch(self, executor: str, inside: str) -> None:
        def spec(x: Any) -> P:
            return P("fsdp") if x.ndim > 1 and x.shape[0] % 2 == 0 else P()

        options: dict[str, Any] = {} if inside == "split by the step" else {"data_axes": "fsdp"}
        if inside == "fsdp":
            options["param_specs"] = jax.tree.map(spec, self.params)
        pipe = self.pipe(executor, axes={"replica": 2, "stage": 2, "fsdp": 2}, **options)
        step, whole_step = self.step(pipe, optax.adam(0.02)), self.whole_step(optax.adam(0.02))
        (state, metrics), (expected, wanted) = (
            self.state_and_metrics(step),
            self.state_and_metrics(whole_step),
        )
        assert_close(metrics, wanted)
        assert_close(step.consensus(state), whole_step.consensus(expected))

    @pytest.mark.parametrize(
        "kind", [*map(exhaustive, ("gpipe", "interleaved")), "zero_bubble", "zbv"]
    )
    def test_every_kind_of_schedule_gives_the_gradients_of_the_model(
        self, executor: str, kind: str
    ) -> None:
        model, params = language_model(4)
        schedule = js.schedules.by_name(kind, 2, 4, 2 if kind in ("interleaved", "zbv") else None)
        pipe = self.pipe(executor, model, params, schedule=schedule, axes={"stage": 2}, remat=True)
        expected = jax.value_and_grad(model, has_aux=True)(params, tokens(8))
        assert_close(jax.value_and_grad(pipe, has_aux=True)(params, tokens(8)), expected)
        assert_close(pipe(params, tokens(8)), expected[0])

    def test_layers_with_state_train_as_without_stages(self, executor: str) -> None:
        def counted(params: Any, x: Any, *, state: Any) -> Any:
            mean = 0.5 * state["mean"] + 0.5 * x.mean(0)
            return x - state["mean"], {"mean": mean, "count": state["count"] + 1}

        layers = [self.model.layers[0], counted, *self.model.layers[1:]]
        model = js.LayeredModel(layers, self.model.loss)
        params = [self.params[0], {}, *self.params[1:]]
        states: list[Any] = [{} for _ in params]
        states[1] = {"mean": np.zeros(4, np.float32), "count": np.int32(0)}
        # With one microbatch the state goes on as it does without stages.
        pipe = self.pipe(
            executor, model, params, schedule=js.schedules.gpipe(2, 1), model_state=states
        )
        results = []
        for step in (self.step(pipe, optax.sgd(0.1)), self.whole_step(optax.sgd(0.1), model)):
            state = step.init(params, model_state=states)
            for t in range(5):
                state, metrics = step(state, tokens(16, seed=t))
            after = js.consensus(state.model_state, mesh=step.mesh)
            results.append((metrics, step.consensus(state), after))
        assert_close(*results)
        assert int(results[0][2][1]["count"]) == 5

    def test_a_second_init_leaves_earlier_states_alone(self, executor: str) -> None:
        step = self.step(self.pipe(executor), optax.adam(0.02))
        other = self.step(self.pipe(executor), optax.sgd(0.5))
        expected, _ = self.state_and_metrics(step, steps=3)
        state = step.init(self.params)
        for t in range(3):
            step.init(self.params)
            other.init(self.params)
            state, _ = step(state, tokens(16, seed=t))
        jax.tree.map(np.testing.assert_array_equal, state.params, expected.params)

    def test_transforms_that_join_stages_are_refused(self, executor: str) -> None:
        clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
        for optimizer in (clipped, optax.apply_if_finite(optax.sgd(0.1), 3)):
            with pytest.raises(ValueError, match="depends on leaves of other"):
                self.step(self.pipe(executor), optimizer).init(self.params)

    def test_checkpoints_resume_with_either_executor(self, executor: str, tmp_path: Any) -> None:
        step = self.step(self.pipe(executor), optax.adam(0.02))
        others = [self.step(self.pipe(e), optax.adam(0.02)) for e in ("one_program", "host")]
        state, _ = self.state_and_metrics(step, steps=3)
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(3, state, wait=True)
            batch, expected = tokens(16, seed=9), None
            for other in others:
                restored = checkpoints.restore(other, self.params)
                assert restored.is_exact
                after, metrics = other(restored.state, batch)
                expected = expected or (metrics, other.consensus(after))
                assert_close((metrics, other.consensus(after)), expected)
            whole = self.whole_step(optax.adam(0.02))
            restored_whole = checkpoints.restore(whole, self.params)
            assert_close(whole.consensus(restored_whole.state), step.consensus(state))

    def test_an_export_is_of_the_models_own_tree(self, executor: str, tmp_path: Any) -> None:
        step = self.step(self.pipe(executor), optax.adam(0.02))
        state, _ = self.state_and_metrics(step, steps=1)
        export_consensus(tmp_path / "model", state.params, mesh=step.mesh)
        exported = load_consensus(tmp_path / "model", like=self.params)
        assert jax.tree.structure(exported) == jax.tree.structure(self.params)
        assert_close(exported, step.consensus(state), 0)
        assert_close(js.consensus(state.params, mesh=step.mesh), step.consensus(state), 0)
        buffers = step.consensus(state, whole=False)
        pipe = self.pipe(executor)
        assert_close(pipe(buffers, tokens(8)), self.model(exported, tokens(8)))

    def test_a_train_pipeline_feeds_the_same_batches(self, executor: str) -> None:
        step = self.step(self.pipe(executor), optax.adam(0.02))
        expected, _ = self.state_and_metrics(step, steps=4)
        batches = [tokens(16, seed=t) for t in range(4)]
        with js.TrainPipeline(step, step.init(self.params), batches, depth=2) as feed:
            results = list(js.train_loop(feed))
        jax.tree.map(np.testing.assert_array_equal, results[-1].state.params, expected.params)

    def test_microbatches_may_wait_on_the_host(self, executor: str) -> None:
        pipe = self.pipe(executor, axes={"stage": 2}, batch_memory="host")
        run = jax.jit(jax.value_and_grad(pipe, has_aux=True)) if executor == "one_program" else None
        run = run or jax.value_and_grad(pipe, has_aux=True)
        stacked = pipe.layout.stack(self.params)
        value, grads = run(stacked, tokens(8))
        expected = jax.value_and_grad(self.model, has_aux=True)(self.params, tokens(8))
        assert_close((value, pipe.layout.unstack(grads)), expected)

    def test_a_step_leaves_no_further_arrays_alive(self, executor: str) -> None:
        step = self.step(self.pipe(executor), optax.adam(0.02))
        state, counts = step.init(self.params), []
        for t in range(40):  # the losses of the last steps are held, so that few are under way
            state, metrics = step(state, tokens(16, seed=t))
            del metrics
            counts.append(len(jax.live_arrays()))
        jax.block_until_ready(state)
        assert len(set(counts[-4:])) == 1

    def test_the_report_counts_what_each_kind_of_step_sends(self, executor: str) -> None:
        step = self.step(self.pipe(executor), optax.adam(0.02))
        report = js.comm_report(step, step.init(self.params), tokens(16))
        assert report.count(axis="replica", kind="local") == 0
        assert report.count(axis="replica", kind="slow", collective="reduce-scatter") == 1
        assert report.count(axis="replica", kind="slow", collective="all-gather") == 1

    def test_bad_arguments_are_named(self, executor: str) -> None:
        for options, message in (
            ({"data_axes": 3}, "`data_axes` must be the name of an axis of `mesh` or .* got 3"),
            (
                {"axis_name": ["stage"]},
                r"`axis_name` must be the name of one axis .* got \['stage'",
            ),
            ({"remat": "full"}, "`remat` must be True or False, .* got 'full'"),
            ({"batch_memory": "disk"}, '`batch_memory` must be "device" or "host", got'),
            ({"data_axes": ("fsdp",)}, "`data_axes` 'fsdp' is not an axis of `mesh`"),
            ({"schedule": js.schedules.gpipe(3, 2)}, "has 3 stages, and `mesh` 2 along"),
            ({"parts": [[[0, 0]], [[0, 4]]]}, "a stage without layers"),
            ({"gradient_scale": -1}, "`gradient_scale` must be a number above 0, got -1"),
        ):
            with pytest.raises(ValueError, match=message):
                self.pipe(executor, **options)
        pipe = self.pipe(executor)
        with pytest.raises(ValueError, match=r"`rng` must be one PRNG key .* got 3\."):
            pipe(self.params, tokens(8), rng=3)
        with pytest.raises(
            ValueError, match=r"`stacked` must be one tree per layer, or .* got dict"
        ):
            pipe({}, tokens(8))
        with pytest.raises(ValueError, match=r"2 microbatches, which must divide .* got 7 "):
            pipe(self.params, tokens(7))
        forward = self.pipe(executor, schedule=js.schedules.gpipe(2, 2, forward_only=True))
        with pytest.raises(ValueError, match="forward passes alone"):
            jax.grad(forward, has_aux=True)(self.params, tokens(8))
        step = self.step(pipe, optax.adam(0.1), accumulate=3)
        with pytest.raises(ValueError, match="`accumulate`=3 must divide the batch"):
            step(step.init(self.params), tokens(16))
        step = self.step(pipe, optax.adam(0.1))
        with pytest.raises(
            ValueError, match="`params` must be a sequence of one tree per layer, 4"
        ):
            step.init(self.params[:2])
