"""MaxText's trainer with jaxslowmo's exchanges: `python train.py CONFIG.yml KEY=VALUE ...`."""

import functools
import itertools
from datetime import datetime

import jax
from absl import app
from exchange import exchange
from flax import nnx
from flax.core.spmd import logical_axis_rules
from maxtext.common import checkpointing, metric_logger, train_state_nnx
from maxtext.trainers.pre_train import train
from maxtext.utils import sharding, train_utils

import jaxslowmo as js


def main(argv):
    """Train, evaluate the mean of the replicas, and save it beside the replicas."""
    config, recorder = train.initialize(argv)
    if config.enable_diloco:
        raise app.UsageError("enable_diloco=True is MaxText's own DiLoCo: leave it out here.")
    setup = train_utils.setup_train_loop(config, recorder)
    _, manager, places, _, mesh, rate, data, loader, ramp_up, tests, state = setup
    graph, one = nnx.split(state)
    of_params, places = sharding.maybe_update_params_sharding_with_opt(config, places)
    loader.input_data_shardings = jax.NamedSharding(mesh, jax.P(*config.data_sharding))
    evaluate = jax.jit(functools.partial(train.eval_step, graph, config))
    first = jax.jit(lambda tree: jax.tree.map(lambda x: x[0], tree), out_shardings=places)
    mean = jax.jit(lambda tree: jax.tree.map(lambda x: x.mean(0), tree))
    step = js.with_exchange(
        functools.partial(train.train_step, graph, config, places, of_params),
        exchange(config),
        mesh=mesh,
        axis_name="diloco",
        get_params=lambda state: nnx.filter_state(state["model"], nnx.Param),
        set_params=lambda state, params: nnx.merge_state(state, nnx.State({"model": params})),
        map_with="vmap",
    )
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        start, state = int(one["optimizer"]["step"].get_value()), step.init(one)
        if manager and checkpointing.latest_step(manager) is not None:  # MaxText read one model
            saved = manager.load_checkpointables(start - 1, {"items": {"replicas": state}})
            state = saved["items"]["replicas"]
        logger = metric_logger.MetricLogger(config, rate, start)
        logger.write_setup_info_to_tensorboard(nnx.filter_state(one["model"], nnx.Param))
        began, last = datetime.now(), config.steps - 1
        for number in range(start, config.steps):
            state, metrics = step(state, loader.load_next_batch(rampup_manager=ramp_up))
            began, seconds = datetime.now(), datetime.now() - began
            report = functools.partial(logger.buffer_and_write_metrics, step_time_delta=seconds)
            tries = tests and number % config.eval_interval == 0
            saves = manager and (number % config.checkpoint_period == 0 or number == last)
            if tries or saves:
                means = nnx.State({"model": step.consensus(state)})
                model = nnx.merge_state(first(state.state), means)
            if tries:
                tests.reset()
                logger.reset_eval_metrics()
                for i, batch in enumerate(
                    itertools.islice(tests, max(config.eval_steps, 0) or None)
                ):
                    report(evaluate(model, batch), i, is_training=False)
            if saves:
                items = train_state_nnx.to_checkpoint_dict(model) | {"replicas": state}
                checkpointing.save_checkpoint(manager, number, items, config, data, True)
            report(mean(metrics), number)
        logger.flush_metrics_and_cleanup()
        if manager:
            checkpointing.wait_until_finished(manager)


if __name__ == "__main__":
    app.run(main)
