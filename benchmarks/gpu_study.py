"""What rare exchanges cost in quality as models grow: training runs of eleven minutes of a GPU.

    python benchmarks/gpu_study.py --minutes 7.5 --state DIR --results DIR
    python benchmarks/gpu_study.py --minutes 3.5 --state DIR --results DIR --last
    python benchmarks/gpu_study.py --show                # the plan, with estimates; writes its file
    python benchmarks/gpu_study.py --tiny --state DIR --results DIR    # tiny sizes, on a CPU

One call trains the next experiment of the plan (`results/gpu_study_plan.json`) for so many minutes,
and saves. A second call with the same `--state` goes on where the first one stopped, to the bit; it
may leave out its save. All runs of an experiment take turns, so that they have seen equally many
bytes whenever time ends. Four virtual replicas are on one device; the runs of an experiment have
the same batches, and rates and periods by docs/choosing.md. After each turn the losses on every
held-out family of packages are written to `gpu_study.jsonl`, and the progress to the plan. Copy
`gpu_study*` from `--results` to benchmarks/results, and run gpu_study_report.py for the page.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import installed_text
import jax
import numpy as np
from machine import describe

import jaxslowmo as js
from jaxslowmo.checkpoint import Checkpoints
from jaxslowmo.cli._config import PRESETS, TrainConfig, replace_options
from jaxslowmo.cli._setup import make_step
from jaxslowmo.data import TextBatches, validation_batches
from jaxslowmo.models import gpt_loss_fn, gpt_preset, init_gpt, num_parameters

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
ROWS, PLAN, TEXT = "gpu_study.jsonl", "gpu_study_plan.json", "gpu_study_text.json"
REPLICAS, SEED = 4, 0
# The published law is that of 30 updates; four fragments need a multiple of 4.
PERIOD = 32
ALL_REDUCE = "all_reduce"
# Options of `jaxslowmo train`, by the rules of docs/choosing.md for 4 replicas and this period.
_DILOCO = {"algorithm": "diloco", "slow_every": PERIOD}
_DILOCO |= {"outer_learning_rate": 0.6, "outer_momentum": 0.9}
ALGORITHMS: dict[str, dict[str, Any]] = {
    ALL_REDUCE: {"algorithm": "all_reduce"},
    "local_sgd": {"algorithm": "local_sgd", "sync_every": PERIOD},
    "slowmo": {
        "algorithm": "slowmo", "sync_every": PERIOD, "slow_every": PERIOD,
        "slow_momentum": 0.4, "slow_learning_rate": 1.0,
    },
    "diloco": _DILOCO,
    "diloco, int4": _DILOCO | {"codec": "int4"},
    # Mode "host" would compile 13 programs for it.
    "diloco, 4 fragments, delay": _DILOCO
    | {"fragments": 4, "delay": 6, "merge": 0.5, "mode": "traced"},
}  # fmt: skip
RARE_RATE = 0.5  # of the all-reduce's learning rate, which is the preset's
BYTES_PER_UPDATE = {"tiny": 256, "1m": 8192}
USUAL_BYTES_PER_UPDATE = 32_768  # of all replicas
TURNS = 24
MARKS = (0.5, 5.0, 10.0, 20.0)  # bytes per parameter at which sizes are compared
HELD_OUT_BYTES = 16_384  # of each held-out family, in an evaluation
# Measured, docs/gpu.md: 124m with 32 windows and cuDNN's attention, its first call, and what the
# host needs to dispatch a step.
PRODUCTS_PER_SECOND, WIDTH_OF_IT = 341e12, 768
DISPATCH_SECONDS, FIRST_CALL_SECONDS_PER_BLOCK = 0.014, 24 / 17
# Assumed: bandwidth of AdamW and of the disk, seconds to start and to gather the text.
MEMORY_BANDWIDTH, DISK_BANDWIDTH, START_SECONDS, TEXT_SECONDS = 3e12, 0.3e9, 10, 40
BUDGET_SECONDS = 660  # two calls


@functools.cache
def size_of(preset: str) -> int:
    """Return the number of parameters of a preset."""
    return num_parameters(gpt_preset(preset))


@dataclass(frozen=True)
class Experiment:
    """Runs that are compared with each other, for eleven minutes of a GPU.

    Attributes:
      name: the experiment's name in the plan.
      preset: size of the model.
      bytes_per_parameter: text that each run sees.
      algorithms: names in `ALGORITHMS`.
    """

    name: str
    preset: str
    bytes_per_parameter: float
    algorithms: tuple[str, ...]

    @property
    def bytes_per_update(self) -> int:
        return BYTES_PER_UPDATE.get(self.preset, USUAL_BYTES_PER_UPDATE)

    @property
    def updates(self) -> int:
        return self.updates_at(self.bytes_per_parameter)

    def updates_at(self, bytes_per_parameter: float) -> int:
        """Return the updates after so many bytes per parameter: a multiple of the period."""
        total = bytes_per_parameter * size_of(self.preset)
        return max(1, round(total / self.bytes_per_update / PERIOD)) * PERIOD

    @property
    def turns(self) -> list[int]:
        """The numbers of updates after which the model is evaluated."""
        even = (round(i * self.updates / TURNS / PERIOD) * PERIOD for i in range(1, TURNS + 1))
        marks = (self.updates_at(mark) for mark in MARKS if mark < self.bytes_per_parameter)
        return sorted({x for x in (*even, *marks) if x})


FIRST = (ALL_REDUCE, "local_sgd", "diloco")
EXPERIMENTS = (
    Experiment("10m", "10m", 20, FIRST),
    Experiment("40m", "40m", 5, (ALL_REDUCE, "diloco")),
    Experiment("124m", "124m", 0.5, (ALL_REDUCE, "diloco")),
    Experiment("10m, others", "10m", 20, (ALL_REDUCE, *(x for x in ALGORITHMS if x not in FIRST))),
    Experiment("1m", "1m", 20, tuple(ALGORITHMS)),
    Experiment("40m, 10 bytes, all_reduce", "40m", 10, (ALL_REDUCE,)),
    Experiment("40m, 10 bytes, diloco", "40m", 10, (ALL_REDUCE, "diloco")),
)
TINY = (Experiment("tiny", "tiny", 3, (ALL_REDUCE, "diloco, int4", "diloco, 4 fragments, delay")),)
# Trained by an earlier experiment of the plan, with the same text.
RECORDED = {"10m, others": {ALL_REDUCE}, "40m, 10 bytes, diloco": {ALL_REDUCE}}


def estimate(experiment: Experiment) -> dict[str, float]:
    """Return the seconds that an experiment takes on an H100, by what was measured of 124m."""
    config = gpt_preset(experiment.preset)
    size, width = size_of(experiment.preset), config.embed_dim
    products = 6 * size + 12 * config.num_layers * width * config.context_length
    # That smaller widths use the device in proportion is assumed.
    rate = PRODUCTS_PER_SECOND * min(1, width / WIDTH_OF_IT)
    adamw = 7 * 4 * size * REPLICAS / MEMORY_BANDWIDTH
    update = max(DISPATCH_SECONDS, products * experiment.bytes_per_update / rate + adamw)
    names = set(experiment.algorithms) - RECORDED.get(experiment.name, set())
    # A byte of an evaluation costs a third of one in training: it has no backward pass.
    evaluated = len(experiment.turns) * installed_text.HELD_OUT * HELD_OUT_BYTES / 3
    updates = experiment.updates + evaluated / experiment.bytes_per_update
    training = update * updates * len(names)
    # One for local steps, one for exchanges; the evaluation, which all share, has one more.
    programs = 1 + sum(1 if name == ALL_REDUCE else 2 for name in names)
    compiling = programs * config.num_layers * FIRST_CALL_SECONDS_PER_BLOCK
    saving = len(names) * 14 * size * REPLICAS / DISK_BANDWIDTH
    other = 2 * START_SECONDS + TEXT_SECONDS + compiling + 2 * saving
    return {
        "milliseconds_per_update": round(1e3 * update, 1),
        "updates": experiment.updates,
        "training_seconds": round(training),
        "other_seconds": round(other),
        "fits": training + other <= BUDGET_SECONDS,
    }


def make_plan(experiments: Iterable[Experiment], measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plan: experiments in order, their estimates, and what was measured of each."""
    plan = [
        dataclasses.asdict(x) | {"estimate": estimate(x), "measured": measured.get(x.name)}
        for x in experiments
    ]
    return json.loads(json.dumps({"budget_seconds": BUDGET_SECONDS, "experiments": plan}))


def config_for(experiment: Experiment, algorithm: str) -> TrainConfig:
    """Return the configuration of a run, as `jaxslowmo train` would have it."""
    context, preset = gpt_preset(experiment.preset).context_length, PRESETS[experiment.preset]
    rate = preset.get("learning_rate", TrainConfig.optimizer.learning_rate)
    values = {
        **preset,
        "preset": experiment.preset,
        "replicas": REPLICAS,
        "steps": experiment.updates,
        "batch": experiment.bytes_per_update // context // REPLICAS,
        "learning_rate": rate * (1 if algorithm == ALL_REDUCE else RARE_RATE),
        "dtype": "bfloat16",
        "attention": "cudnn" if jax.default_backend() == "gpu" else "xla",
        "mode": "host",
        "seed": SEED,
        **ALGORITHMS[algorithm],
    }
    return replace_options(TrainConfig(), values)


@dataclass(frozen=True)
class Text:
    """The text that `installed_text` wrote: a part for each replica, and held-out families."""

    shares: Sequence[np.ndarray]
    held_out: dict[str, np.ndarray]
    summary: dict[str, Any]

    @classmethod
    def in_folder(cls, folder: Path, most_bytes: float = float("inf")) -> "Text":
        """Return the text in a folder, which is gathered there first where it is missing."""
        if not (folder / "text.json").exists():
            installed_text.write(folder, SEED, most_bytes)
        summary = json.loads((folder / "text.json").read_text("utf-8"))
        ends = np.cumsum(list(summary["held_out"].values()))[:-1]
        parts = np.split(np.load(folder / "held_out.npy"), ends)
        held_out = dict(zip(summary["held_out"], parts, strict=True))
        shares = np.array_split(np.load(folder / "training.npy"), REPLICAS)
        return cls(shares, held_out, summary)


class Run:
    """One run: its step, its state after `done` updates, and the losses until then.

    Args:
      experiment: what it belongs to.
      algorithm: a name in `ALGORITHMS`.
      text: what it sees and is evaluated on.
      folder: place of its checkpoints; where there are some, it goes on with the newest.

    Raises:
      SystemExit: the checkpoints are those of other settings.
    """

    def __init__(self, experiment: Experiment, algorithm: str, text: Text, folder: Path) -> None:
        config = config_for(experiment, algorithm)
        own = config.model
        model = gpt_preset(own.preset, dtype=own.dtype, attention=own.attention)
        window = model.context_length + 1
        self.settings: dict[str, Any] = {
            "experiment": experiment.name,
            "preset": experiment.preset,
            "algorithm": algorithm,
            "options": ALGORITHMS[algorithm],
            "parameters": size_of(experiment.preset),
            "replicas": REPLICAS,
            "updates": experiment.updates,
            "bytes_per_update": experiment.bytes_per_update,
            "learning_rate": config.optimizer.learning_rate,
            "text": text.summary["fingerprint"],
            "training_bytes": text.summary["training_bytes"],
            "held_out": list(text.held_out),
        }
        loss_fn = gpt_loss_fn(model)
        mesh = js.virtual_mesh({"replica": REPLICAS})
        self._step = make_step(config, loss_fn, mesh)
        self._batches = TextBatches(
            text.shares, batch_size=config.data.batch, window=window, seed=config.data_seed
        )
        count = max(1, HELD_OUT_BYTES // window)
        windows = functools.partial(validation_batches, num_batches=1, window=window)
        self._held_out = np.stack([windows(x, batch_size=count)[0] for x in text.held_out.values()])
        self._losses = jax.jit(
            lambda params, batches: jax.lax.map(lambda batch: loss_fn(params, batch), batches)
        )
        self._checkpoints = Checkpoints(folder / re.sub(r"\W+", "-", algorithm), keep=1)
        self.history: list[dict[str, Any]] = []
        self.seconds = 0.0  # of the last turn
        params = init_gpt(model, SEED)
        if not self._checkpoints.steps():
            self.state = self._step.init(params, seed=SEED)
            return
        restored = self._checkpoints.restore(self._step, params, seed=SEED)
        if restored.extra["settings"] != self.settings:
            raise SystemExit(f"gpu_study.py: {folder} holds a run with other settings")
        self.state, self.history = restored.state, restored.extra["history"]

    @property
    def done(self) -> int:
        return self.history[-1]["updates"] if self.history else 0

    @property
    def num_bytes(self) -> int:
        """The size of the state in bytes."""
        return sum(x.nbytes for x in jax.tree.leaves(self.state))

    def train_until(self, update: int) -> None:
        """Train until this many updates are done, and evaluate the average of the replicas."""
        began = time.monotonic()
        self._batches.set_state(self._batches.get_state() | {"next_batch": self.done})
        for result in js.train_loop(
            self._step, self.state, self._batches, num_steps=update, prefetch=2
        ):
            self.state = result.state
        jax.block_until_ready(self.state)
        trained = time.monotonic() - began
        losses = np.asarray(self._losses(self._step.consensus(self.state), self._held_out))
        self.history.append(
            {
                "updates": update,
                "seconds": round(trained, 3),
                "losses": [round(float(x), 5) for x in losses],
            }
        )
        self.seconds = time.monotonic() - began

    def save(self) -> None:
        """Save in the background; `close` waits."""
        extra = {"settings": self.settings, "history": self.history}
        if self.done not in self._checkpoints.steps():
            self._checkpoints.save(self.done, self.state, extra=extra)

    def close(self) -> None:
        self._checkpoints.close()


def train(
    experiment: Experiment,
    runs: Sequence[Run],
    remaining: Callable[[], float],
    report: Callable[[Run], None],
    *,
    saves: bool,
) -> bool:
    """Train the runs in turns while there is time, and save them.

    Args:
      experiment: what the runs belong to.
      runs: its runs, each as far as it has come.
      remaining: returns the seconds that are left, saving included.
      report: called with a run after each of its turns.
      saves: whether a later call goes on.

    Returns:
      Whether all runs are finished.
    """
    saving = 3 + saves * sum(run.num_bytes for run in runs) / DISK_BANDWIDTH
    turns = [(end, run) for end in experiment.turns for run in runs if run.done < end]
    for end, run in turns:
        if remaining() < 1.3 * run.seconds + saving:
            break
        run.train_until(end)
        report(run)
    is_finished = all(run.done == experiment.updates for run in runs)
    if saves and not is_finished:
        for run in runs:  # all at once
            run.save()
        for run in runs:
            run.close()
    return is_finished


class Results:
    """The rows and the plan in a folder, which begin as those of benchmarks/results.

    Args:
      folder: the folder in which both are written.
      experiments: the experiments of the plan.
      about: what is written with each row: machine, versions, commit.
    """

    def __init__(
        self, folder: Path, experiments: Sequence[Experiment], about: Mapping[str, Any]
    ) -> None:
        self._folder, self._experiments, self._about = folder, experiments, about
        is_recorded = (folder / PLAN).exists() or experiments == TINY
        source = folder if is_recorded else RESULTS
        self.rows = {key_of(row): row for row in read_rows(source)}
        plan = source / PLAN
        recorded = json.loads(plan.read_text("utf-8"))["experiments"] if plan.exists() else []
        self.measured = {x["name"]: x["measured"] for x in recorded if x["measured"]}

    def is_recorded(self, experiment: Experiment, algorithm: str, text: Text) -> bool:
        """Whether another experiment has finished this run, with the same text."""
        fingerprint = text.summary["fingerprint"]
        row = self.rows.get((experiment.preset, algorithm, experiment.updates, fingerprint))
        return bool(
            row and row["experiment"] != experiment.name and row["done"] == experiment.updates
        )

    def add(self, run: Run) -> None:
        """Add what a run has come to, and write the files."""
        row = {**run.settings, "done": run.done, "history": run.history, **self._about}
        self.rows[key_of(row)] = row
        done = self.measured.setdefault(row["experiment"], {}).setdefault("done", {})
        done[row["algorithm"]] = run.done
        self.measured[row["experiment"]] |= {
            name: self._about[name] for name in ("machine", "commit")
        }
        self.write()

    def write(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        if self.rows:
            lines = [json.dumps(row) + "\n" for row in self.rows.values()]
            (self._folder / ROWS).write_text("".join(lines), "utf-8")
        plan = make_plan(self._experiments, self.measured)
        (self._folder / PLAN).write_text(json.dumps(plan, indent=1) + "\n", "utf-8")


def key_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what tells a row from others: a later row with the same key replaces it."""
    return row["preset"], row["algorithm"], row["updates"], row["text"]


def read_rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / ROWS
    return [json.loads(x) for x in path.read_text("utf-8").splitlines()] if path.exists() else []


def versions() -> dict[str, str]:
    names = ("jaxslowmo", "flax", "optax", "orbax-checkpoint", "numpy")
    return {name: importlib.metadata.version(name) for name in names}


def current_commit() -> str:
    """Return the commit of the checkout, or "unknown" in a copy without git."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def run(arguments: argparse.Namespace, remaining: Callable[[], float]) -> None:
    """Train the chosen experiment, or the next of the plan, for one call."""
    experiments = TINY if arguments.tiny else EXPERIMENTS
    about = {
        "machine": describe(),
        "versions": versions(),
        "commit": arguments.commit or current_commit(),
    }
    results = Results(arguments.results, experiments, about)
    names = [x.name for x in experiments]
    missing = [name for name in names if name not in results.measured]
    # Before the plan, to which a first call has written what it has measured.
    begun = [name for name in names if (arguments.state / slug(name)).exists()]
    name = arguments.experiment or next(iter(begun + missing), None)
    if name not in names:
        raise SystemExit(
            f"gpu_study.py: --experiment must be one of {', '.join(names)}; got {name}"
            if name
            else "gpu_study.py: all experiments are measured; --experiment repeats one"
        )
    experiment, folder = experiments[names.index(name)], arguments.state / slug(name)
    finished = folder / "finished"
    if finished.exists():
        raise SystemExit(
            f"gpu_study.py: {name} is finished; --experiment begins another one; not measured: "
            f"{', '.join(missing) or 'none'}"
        )
    text = Text.in_folder(arguments.state / "text", 6e6 if arguments.tiny else float("inf"))
    print(f"{name}: {installed_text.describe(text.summary)}", flush=True)
    arguments.results.mkdir(parents=True, exist_ok=True)
    (arguments.results / TEXT).write_text(json.dumps(text.summary) + "\n", "utf-8")
    names = [x for x in experiment.algorithms if not results.is_recorded(experiment, x, text)]
    runs = [Run(experiment, x, text, folder) for x in names]

    def report(run: Run) -> None:
        results.add(run)
        last = run.history[-1]
        print(
            f"{run.settings['algorithm']}: {last['updates']} of {experiment.updates} updates, "
            f"loss {np.mean(last['losses']):.4f}, {run.seconds:.1f} s, {remaining():.0f} s left",
            flush=True,
        )

    if train(experiment, runs, remaining, report, saves=not arguments.last):
        folder.mkdir(exist_ok=True)
        finished.touch()
        print(f"{name}: finished", flush=True)
    else:
        print(f"{name}: {'ended' if arguments.last else 'saved; a second call goes on'}")


def slug(name: str) -> str:
    return re.sub(r"\W+", "-", name)


def show(results: Results) -> None:
    """Print the plan, and write it."""
    results.write()
    print(f"of {BUDGET_SECONDS} s:")
    for row in make_plan(EXPERIMENTS, results.measured)["experiments"]:
        numbers = row["estimate"]
        print(
            f"{row['name']}: {row['bytes_per_parameter']:g} bytes per parameter, "
            f"{len(row['algorithms'])} runs of {numbers['updates']} updates of "
            f"{numbers['milliseconds_per_update']} ms; {numbers['training_seconds']} s of training "
            f"and {numbers['other_seconds']} s besides; measured: {row['measured']}"
        )


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--minutes", type=float, default=8.0, help="of this call, saving included")
    parser.add_argument("--last", action="store_true", help="save no state: no call goes on")
    parser.add_argument("--state", type=Path, help="folder for text, checkpoints and programs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for rows and plan")
    parser.add_argument("--experiment", help="one of the plan (default: the next one)")
    parser.add_argument("--commit", help="of this copy, if git does not know")
    parser.add_argument("--show", action="store_true", help="print and write the plan, and end")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on a CPU")
    arguments = parser.parse_args(words)
    if arguments.state is None and not arguments.show:
        parser.error("--state is needed: a folder on this machine's disk")
    if arguments.minutes <= 0:
        parser.error(f"--minutes must be > 0, got {arguments.minutes:g}")
    return arguments


def main() -> None:
    began = time.monotonic()
    arguments = parse()
    if arguments.show:
        return show(Results(arguments.results, EXPERIMENTS, {}))
    if not arguments.tiny and jax.default_backend() != "gpu":
        raise SystemExit("gpu_study.py: jax sees no GPU; --tiny tries this program on a CPU")
    # Another compilation may choose other kernels, and with them other bits.
    jax.config.update("jax_compilation_cache_dir", str(arguments.state.resolve() / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    run(arguments, lambda: 60 * arguments.minutes - (time.monotonic() - began))


if __name__ == "__main__":
    main()
