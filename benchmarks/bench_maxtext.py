"""Time of a local and of a slow step of MaxText's own DiLoCo and of examples/maxtext.

    .venv-maxtext/bin/python benchmarks/bench_maxtext.py

The model of examples/maxtext/tiny.yml, two replicas of four CPU devices, a slow step in every
fourth update. The trainers run in turns in one process; each step is waited for. Ratios are to
MaxText's own step.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/maxtext"))

from runs import ITS_OWN, MODELS, other_batches, run  # noqa: I001  it sets the devices before jax is imported

import jax
import numpy as np
from maxtext.trainers.pre_train import train as its_own
from maxtext.utils import train_utils

import jaxslowmo as js
import train

PERIOD, STEPS, TURNS = 4, 48, 3
FIRST = 2 * PERIOD  # steps that are left out: they compile


def timed(step: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """Return the step, which notes how long each call took."""

    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        out = jax.block_until_ready(step(*args, **kwargs))
        seconds.append(time.perf_counter() - began)
        return out

    return call


def seconds_of(trainer: str, options: dict[str, Any]) -> list[float]:
    """Return the times of all steps of a run."""
    seconds: list[float] = []
    if trainer == "MaxText's own":
        make = train_utils.jit_train_and_eval_step

        def make_timed(*args: Any, **kwargs: Any) -> Any:
            step, evaluate = make(*args, **kwargs)
            program = mock.Mock(side_effect=timed(step, seconds), lower=step.lower)
            return program, evaluate

        with mock.patch.object(train_utils, "jit_train_and_eval_step", make_timed):
            run(its_own.main, **options, **ITS_OWN["DiLoCo"])
        return seconds
    make_step, mode = js.with_exchange, trainer.rpartition(" ")[2]

    def with_timed(*args: Any, **kwargs: Any) -> Any:
        step = make_step(*args, mode=mode, **kwargs)
        wrapped = mock.Mock(wraps=step, side_effect=timed(step, seconds))
        return wrapped

    with mock.patch.object(js, "with_exchange", with_timed):
        run(train.main, **options)
    return seconds


def main() -> None:
    """Print a table."""
    trainers = ["MaxText's own", "jaxslowmo, traced", "jaxslowmo, host"]
    print("| model | trainer | local step, ms | slow step, ms |")
    print("|---|---|---:|---:|")
    for model in ("fsdp", "tensor x fsdp"):
        options = {"diloco_sync_period": PERIOD, "steps": STEPS} | MODELS[model]
        runs: dict[str, list[list[float]]] = {x: [] for x in trainers}
        with other_batches():
            for turn in range(TURNS):  # each trainer is once the first
                for trainer in [*trainers[turn:], *trainers[:turn]]:
                    runs[trainer].append(seconds_of(trainer, options))
        base: list[float] = []
        for trainer in trainers:
            times = np.array(runs[trainer])
            later = times[:, FIRST:].reshape(TURNS, -1, PERIOD)
            found = [float(np.median(x)) for x in (later[..., :-1], later[..., -1])]
            base = base or found
            shown = [f"{1e3 * x:.1f} ({x / y:.2f})" for x, y in zip(found, base, strict=True)]
            print(f"| {model} | {trainer} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
