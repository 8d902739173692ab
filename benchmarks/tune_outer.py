"""Trains a small language model with several momenta and rates of slow steps; prints the best.

    python benchmarks/tune_outer.py [--preset demo] [--replicas 8] [--algorithm slowmo]
        [--periods 48] [--momenta 0.2,0.4,0.6] [--rates 1] [--factors 0.5,1] [--seeds 0,1,2]

All seeds of a setting train in one program, with virtual replicas on one device. A factor
multiplies the learning rate: slow momentum often works best with a smaller one.
"""

import argparse
import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import jaxslowmo as js
from jaxslowmo.cli._config import PRESETS, TrainConfig, replace_options
from jaxslowmo.cli._figures import COLOURS, clean, new_figure, save_figure
from jaxslowmo.cli._setup import learning_rate_schedule
from jaxslowmo.data import TextBatches, read_corpus, split_corpus, validation_batches
from jaxslowmo.models import gpt_loss_fn, gpt_preset, init_gpt


class Setting(NamedTuple):
    """Numbers of a slow step, also traced ones. A plain average has rate 1 and momentum 0."""

    factor: Any
    rate: Any
    momentum: Any


def transforms(config: TrainConfig, period: int, setting: Setting) -> Any:
    """Return optimizer and slow steps with a setting."""
    usual, own = learning_rate_schedule(config), config.algorithm

    def schedule(count: Any) -> Any:
        return setting.factor * usual(count)

    if own.algorithm == "diloco":
        outer = optax.sgd(setting.rate, momentum=setting.momentum, nesterov=True)
        sync = js.diloco("replica", sync_every=period, outer_optimizer=outer, shard_state=True)
    else:
        sync = js.slowmo(
            "replica",
            base=js.local_sgd("replica", sync_every=own.sync_every),
            sync_every=period,
            momentum=setting.momentum,
            slow_learning_rate=setting.rate,
            learning_rate=schedule,
        )
    inner = optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=config.optimizer.weight_decay)
    return js.chain(js.clip_by_global_norm(config.optimizer.clip), inner, sync)


def programs(config: TrainConfig, period: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return functions that start the runs of a setting, and train them.

    A run is the parameters and states of its virtual replicas. All runs of a setting have different
    seeds, and train side by side. Settings are traced, so that all of them share one program.
    """
    replicas, loss_fn = config.mesh.num_replicas, gpt_loss_fn(gpt_preset(config.model.preset))
    over_replicas = functools.partial(jax.vmap, axis_name="replica", axis_size=replicas)

    def start(setting: Setting, params: Any) -> Any:
        tx = transforms(config, period, setting)
        return over_replicas(lambda params: (params, tx.init(params)), in_axes=None)(params)

    def run(setting: Setting, runs: Any, batches: Any) -> Any:
        tx = transforms(config, period, setting)

        def update(replica: Any, batch: Any) -> Any:
            params, state = replica
            updates, state = tx.update(jax.grad(loss_fn)(params, batch), state, params)
            return optax.apply_updates(params, updates), state

        return jax.lax.scan(lambda *x: (over_replicas(update)(*x), None), runs, batches)[0]

    return (
        jax.jit(jax.vmap(start, (None, 0))),
        jax.jit(jax.vmap(run, (None, 0, 0)), donate_argnums=1),
    )


def losses_of(
    config: TrainConfig, period: int, settings: Sequence[Setting], seeds: Sequence[int]
) -> np.ndarray:
    """Return validation losses of the averaged models in nats per byte: (settings, seeds)."""
    model, batch = gpt_preset(config.model.preset), config.data.batch
    window, replicas = model.context_length + 1, config.mesh.num_replicas
    split = split_corpus(read_corpus(config.data.data), replicas)
    held_out = validation_batches(
        split.validation,
        num_batches=config.run.eval_batches,
        batch_size=8192 // model.context_length,
        window=window,
    )
    texts = [TextBatches(split.shares, batch_size=batch, window=window, seed=s) for s in seeds]
    batches = np.array([[x.batch(step) for step in range(config.run.steps)] for x in texts])
    batches = batches.reshape(len(seeds), config.run.steps, replicas, batch, window)
    params = jax.tree.map(lambda *x: np.stack(x), *(init_gpt(model, seed) for seed in seeds))
    start, run = programs(config, period)
    evaluate = jax.jit(jax.vmap(gpt_loss_fn(model), (0, None)))
    found = []
    for setting in settings:
        trained, _ = run(setting, start(setting, params), batches)
        mean = jax.tree.map(lambda x: x.mean(1), trained)
        found.append(np.mean([evaluate(mean, x) for x in held_out], axis=0))
    losses = np.array(found)
    return np.where(np.isnan(losses), np.inf, losses)


def advice(settings: Sequence[Setting], losses: np.ndarray) -> str:
    """Return the best setting in words, and with how many seeds it beats plain averages."""
    means = losses.mean(1)
    plain = min(
        (i for i, x in enumerate(settings) if (x.rate, x.momentum) == (1, 0)), key=means.__getitem__
    )
    best = int(np.argmin(means))
    better, count = int((losses[best] < losses[plain]).sum()), losses.shape[1]
    if better <= count / 2:  # as it is if the best is a plain average
        return f"no setting beats plain averages, {means[plain]:.3f}"
    factor, rate, momentum = settings[best]
    found = f"momentum {momentum:g}, rate {rate:g}, {factor:g} times the learning rate"
    return (
        f"{found}: {means[best]:.3f}, plain averages {means[plain]:.3f}; better with {better} of "
        f"{count} seeds"
    )


def draw(settings: Sequence[Setting], losses: dict[int, np.ndarray], path: Path) -> None:
    """Draw the loss against the momentum: a panel per period, a line per rate and factor."""
    figure = new_figure((3 + 4 * len(losses), 4.5), "Validation loss by slow momentum")
    panels = figure.subplots(1, len(losses), sharey=True, squeeze=False)[0]
    colours = itertools.cycle(COLOURS.values())
    lines = {line: next(colours) for line in sorted({(x.factor, x.rate) for x in settings})}
    for axes, (period, found) in zip(panels, losses.items(), strict=True):
        for (factor, rate), colour in lines.items():
            own = [i for i, x in enumerate(settings) if (x.factor, x.rate) == (factor, rate)]
            xs, ys = [settings[i].momentum for i in own], found[own]
            label, middle = f"rate {rate:g}, factor {factor:g}", ys.mean(1)
            bars = middle - ys.min(1), ys.max(1) - middle
            axes.errorbar(xs, middle, bars, color=colour, marker="o", capsize=2, label=label)
        axes.set_title(f"every {period} steps", size=10, loc="left")
        axes.set_xlabel("momentum (0: plain averages)")
        clean(axes, grid="y")
    panels[0].set_ylabel("validation loss, nats per byte")
    panels[0].legend(frameon=False)
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default="demo")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--algorithm", choices=("slowmo", "diloco"), default="slowmo")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--data")
    for name, values in (("periods", "48"), ("momenta", "0.2,0.4,0.6,0.8"), ("rates", "1")):
        parser.add_argument(f"--{name}", default=values)
    parser.add_argument("--factors", default="1")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path, default=Path("outer.png"))
    asked = parser.parse_args()
    values = {x: getattr(asked, x) for x in ("preset", "replicas", "algorithm", "steps", "data")}
    values = {name: value for name, value in values.items() if value is not None}
    config = replace_options(TrainConfig(), PRESETS[asked.preset] | values)
    momenta, rates, factors = (
        [float(x) for x in text.split(",")] for text in (asked.momenta, asked.rates, asked.factors)
    )
    pairs = dict.fromkeys([(1.0, 0.0), *itertools.product(rates, momenta)])  # plain averages first
    settings = [Setting(factor, *pair) for factor, pair in itertools.product(factors, pairs)]
    seeds, losses = [int(x) for x in asked.seeds.split(",")], {}
    for period in map(int, asked.periods.split(",")):
        losses[period] = losses_of(config, period, settings, seeds)
        for setting, row in zip(settings, losses[period], strict=True):
            shown = ", ".join(f"{name} {x:g}" for name, x in setting._asdict().items())
            print(f"every {period}: {shown}: {row.mean():.3f} ({row.min():.3f} to {row.max():.3f})")
        print(f"Every {period}: {advice(settings, losses[period])}.")
    draw(settings, losses, asked.out)
    print(asked.out)


if __name__ == "__main__":
    main()
