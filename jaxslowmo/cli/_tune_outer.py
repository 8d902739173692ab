"""`jaxslowmo tune outer`: settings of slow steps, each with several seeds; a table, a picture."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import jaxslowmo as js
from jaxslowmo.data import TextBatches, read_corpus
from jaxslowmo.models import gpt_loss_fn, init_gpt, num_parameters

from ._errors import INTERRUPTED, usage_errors
from ._figures import COLOURS, clean, new_figure, save_figure
from ._output import format_count, format_loss, say, table_of, tracked, write_json
from .config._commands import TuneOuterConfig
from .config._training import TrainConfig
from .processes._peers import StopOnSignal
from .run._division import Text, choose_mesh, divide_text
from .run._recipes import build_setting, config_of
from .run._run_folder import make_folder

_MOST_ROWS = 20  # of the table; tune.json has all
Setting = Mapping[str, Any]


def tune_outer(config: TuneOuterConfig) -> int:
    """Train every setting with every seed, then write a table, a picture and tune.json.

    After Ctrl-C they show the periods that have finished, else the first one's last evaluation.

    Raises:
      CommandError: the options do not fit each other or the data.
    """
    console, train = Console(), config.train
    with usage_errors():
        placement = choose_mesh(train)
        text = divide_text(train, read_corpus(train.data))
        for period, setting in itertools.product(config.periods, _settings(config)):
            # Traced values are not checked, so all transforms are made once from numbers.
            build_setting(dataclasses.replace(train, slow_every=period), setting)
    folder = make_folder(config.out, "tune")
    count = len(_settings(config)) * len(config.seeds)
    size = f"{format_count(num_parameters(config_of(train)))} parameters"
    subject = f"{train.preset}: {size}, {placement.description}"
    what = f"{count} runs of {train.steps} steps for each of {len(config.periods)} periods"
    say(console, subject, text.description, what)
    losses_of: dict[int, np.ndarray] = {}
    done, total = 0, len(config.periods) * math.ceil(train.steps / train.eval_every)
    with StopOnSignal() as stop:
        runs = train_all(config, text)
        for period, count, losses in tracked(runs, "training", console, total):
            # Losses of a period that was stopped early do not compare with those of a whole one.
            if period == config.periods[0] or count == train.steps:
                losses_of[period], done = losses, count
            if stop.reason:
                break
    rows = [row for item in losses_of.items() for row in make_rows(config, *item)]
    if not rows:
        return INTERRUPTED
    rows.sort(key=lambda row: row["mean"])
    result = {"config": config, "data": text.description, "steps_done": done, "rows": rows}
    write_json(folder / "tune.json", result)
    about = f"{subject}; {train.algorithm}, {done} steps"
    draw_settings(rows, folder / "tune.png", subtitle=about)
    console.print(rows_table(rows))
    if stop.reason:
        say(console, f"Stopped: these are losses after {done} of {train.steps} steps.")
    say(console, *advice(config, rows), str(folder / "tune.png"))
    return INTERRUPTED if stop.reason else 0


def _settings(config: TuneOuterConfig) -> list[dict[str, float]]:
    columns = config.settings()
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def train_all(config: TuneOuterConfig, text: Text) -> Iterator[tuple[int, int, np.ndarray]]:
    """Train; after each evaluation yield the period, steps, and losses (settings, seeds)."""
    train, model, settings = config.train, config_of(config.train), _settings(config)
    batch, window = train.batch, model.context_length + 1
    texts = [
        TextBatches(text.shares, batch_size=batch, window=window, seed=seed)
        for seed in config.seeds
    ]
    params = jax.tree.map(lambda *x: np.stack(x), *(init_gpt(model, s) for s in config.seeds))
    losses_of = jax.jit(jax.vmap(gpt_loss_fn(model), (0, None)))
    for period in config.periods:
        start, run, consensus = _programs(dataclasses.replace(train, slow_every=period))
        replicas = [start(setting, params) for setting in settings]
        for first in range(0, train.steps, train.eval_every):
            steps = range(first, min(first + train.eval_every, train.steps))
            batches = np.array([[batches.batch(step) for step in steps] for batches in texts])
            shape = (len(texts), len(steps), train.replicas, batch, window)
            batches = batches.reshape(shape)
            replicas = [run(*both, batches) for both in zip(settings, replicas, strict=True)]
            models = [consensus(*both) for both in zip(settings, replicas, strict=True)]
            losses = [[losses_of(model, x) for x in text.validation] for model in models]
            yield period, steps.stop, np.mean(losses, axis=1)


def _programs(train: TrainConfig) -> tuple[Callable[..., Any], ...]:
    """Return functions that start the runs of one setting, train them, and average their replicas.

    A run is the parameters and optimizer states of its virtual replicas. All runs of a setting have
    different seeds, and train side by side. Settings are traced, so all of them share one program.
    """
    over_replicas = functools.partial(jax.vmap, axis_name="replica", axis_size=train.replicas)
    loss_fn = gpt_loss_fn(config_of(train))

    def start(setting: Setting, params: Any) -> Any:
        tx = js.chain(*build_setting(train, setting))
        return over_replicas(lambda params: (params, tx.init(params)), in_axes=None)(params)

    def run(setting: Setting, replicas: Any, batches: Any) -> Any:
        tx = js.chain(*build_setting(train, setting))

        def update(replica: Any, batch: Any) -> Any:
            params, state = replica
            gradients = jax.grad(loss_fn)(params, batch)
            updates, state = tx.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        return jax.lax.scan(lambda *x: (over_replicas(update)(*x), None), replicas, batches)[0]

    def consensus(setting: Setting, replicas: Any) -> Any:
        params, state = replicas
        _, sync = build_setting(train, setting)
        mesh = js.virtual_mesh({"replica": train.replicas})
        return js.consensus(params, mesh=mesh, shares=sync.shares(state[-1]))

    return (
        jax.jit(jax.vmap(start, (None, 0))),
        jax.jit(jax.vmap(run, (None, 0, 0)), donate_argnums=1),
        jax.jit(jax.vmap(consensus, (None, 0))),
    )


def make_rows(config: TuneOuterConfig, period: int, losses: np.ndarray) -> list[dict[str, Any]]:
    """Return the results of the settings with one period.

    Args:
      config: configuration of the command.
      period: steps between slow steps.
      losses: validation losses of the consensus in nats per byte: (settings, seeds).

    Returns:
      Dicts with `period`, `factor`, `rate` and `momentum` of the setting, `losses` (one per seed),
      `mean` (of these), `plain` (losses of plain averages with the same period, at the factor that
      suits them best), and `better` (number of seeds with a smaller loss than those).
    """
    columns, losses = config.settings(), np.where(np.isnan(losses), np.inf, losses)
    rows: list[dict[str, Any]] = [
        {
            "period": period,
            **dict(zip(columns, setting, strict=True)),
            "losses": of_seeds.tolist(),
            "mean": of_seeds.mean().item(),
        }
        for *setting, of_seeds in zip(*columns.values(), losses, strict=True)
    ]
    plain = min(filter(_is_plain, rows), key=lambda row: row["mean"])["losses"]
    return [
        row | {"plain": plain, "better": int(np.less(row["losses"], plain).sum())} for row in rows
    ]


def _is_plain(row: Mapping[str, Any]) -> bool:
    """Return whether the slow step is a plain average."""
    return (row["rate"], row["momentum"]) == (1, 0)


def rows_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of the best settings, and of all plain averages.

    Args:
      rows: rows of `make_rows`, from the smallest mean loss on.
    """

    def cells(row: Mapping[str, Any]) -> dict[str, str]:
        losses = row["losses"]
        return {
            **{name: f"{row[name]:g}" for name in ("period", "factor", "rate", "momentum")},
            "loss": format_loss(row["mean"]),
            "from": format_loss(min(losses)),
            "to": format_loss(max(losses)),
            "better": "plain average" if _is_plain(row) else f"{row['better']} of {len(losses)}",
        }

    caption = (
        "loss: mean over the seeds, in nats per byte, and the smallest and largest; better: seeds "
        "with a smaller loss than plain averages, with the same period"
    )
    shown = (row for i, row in enumerate(rows) if i < _MOST_ROWS or _is_plain(row))
    return table_of(map(cells, shown), caption=caption)


def advice(config: TuneOuterConfig, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the best setting of each period in words, and whether it beats plain averages.

    Args:
      config: configuration of the command.
      rows: rows of `make_rows`, from the smallest mean loss on.
    """
    sentences, train = [], config.train
    best = {row["period"]: row for row in reversed(rows)}
    for period, row in sorted(best.items()):
        count, plain = len(row["losses"]), f"{np.mean(row['plain']):.3f}"
        if row["better"] <= count / 2:  # as it is if the best is a plain average
            sentences.append(f"Every {period}: no setting beats plain averages, {plain}.")
            continue
        rate, momentum = row["rate"], row["momentum"]
        call = f"slowmo(..., momentum={momentum:g}, slow_learning_rate={rate:g})"
        if train.algorithm == "diloco":
            outer = f"optax.sgd({rate:g}, momentum={momentum:g}, nesterov=True)"
            call = f"diloco(..., outer_optimizer={outer})"
        tried = {"momenta": momentum, "rates": rate, "factors": row["factor"]}
        edge = [
            f"--{name} {value:g}"
            for name, value in tried.items()
            if len(values := getattr(config, name)) > 1 and value in (min(values), max(values))
        ]
        sentences.append(
            f"Every {period}: js.{call} at a learning rate of "
            f"{row['factor'] * train.learning_rate:g} has a loss of {row['mean']:.3f}, "
            f"plain averages {plain}; it is smaller with {row['better']} of {count} seeds."
            + (f" At the end of what was tried: {', '.join(edge)}; try more." if edge else "")
        )
    return sentences


def draw_settings(rows: Sequence[Mapping[str, Any]], path: Path, *, subtitle: str) -> None:
    """Draw the loss against the momentum: a panel per period, a line per rate and factor.

    Args:
      rows: rows of `make_rows`.
      path: path of the PNG.
      subtitle: description of what was trained.
    """
    periods = sorted({row["period"] for row in rows})
    tried = [row for row in rows if not _is_plain(row)]
    lines = sorted({(row["factor"], row["rate"]) for row in tried})
    colours = [value for name, value in COLOURS.items() if name not in ("black", "grey")]
    what = "Points: means over seeds; bars: smallest and largest. Dashed: plain averages."
    size = (3.2 + 4.2 * len(periods), 4.6)
    figure = new_figure(size, "Validation loss by slow momentum", subtitle, what)
    panels = figure.subplots(1, len(periods), sharey=True, squeeze=False)[0]
    for axes, period in zip(panels, periods, strict=True):
        for number, (factor, rate) in enumerate(lines):
            line = [
                (row["momentum"], row["mean"], min(row["losses"]), max(row["losses"]))
                for row in tried
                if (row["period"], row["factor"], row["rate"]) == (period, factor, rate)
            ]
            xs, means, low, high = np.array(sorted(line)).T
            # Points of one momentum stand beside each other.
            xs += 0.012 * (number - (len(lines) - 1) / 2)
            label, colour = f"rate {rate:g},\nfactor {factor:g}", colours[number % len(colours)]
            look: Any = {"color": colour, "marker": "o", "capsize": 2, "label": label}
            axes.errorbar(xs, means, (means - low, high - means), **look)
        plain = next(np.mean(row["plain"]) for row in rows if row["period"] == period)
        axes.axhline(plain, color="black", linewidth=1, linestyle="--", zorder=1)
        axes.set_title(f"every {period} steps", size=10, loc="left")
        axes.set_xlabel("momentum")
        clean(axes, grid="y")
    panels[0].set_ylabel("validation loss, nats per byte")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize=9, frameon=False
    )
    save_figure(figure, path)
