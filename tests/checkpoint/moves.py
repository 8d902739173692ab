"""Runs that are saved in one place and go on in another."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import jaxslowmo as js
from jaxslowmo.checkpoint import Checkpoints

SAVED, LAST = 5, 8  # updates, between which an exchange of every algorithm is due


class Run:
    """A step in some place, with `values`: on the host, what no move may change."""

    step: js.train.TrainStep
    params: Any  # one copy, as the step takes them
    batch: Callable[[int], Any]
    values: Callable[[js.TrainState], Any]

    def trained(self, state: js.TrainState, start: int, end: int) -> js.TrainState:
        for t in range(start, end):
            state, _ = self.step(state, self.batch(t))
        return state


class Saved(NamedTuple):
    """A run whose checkpoint lies in `folder`, what it was then, and its state in the end."""

    run: Any
    folder: Path
    then: Any
    end: js.TrainState


def once_saved(
    make: Callable[[str, str], Run], folders: pytest.TempPathFactory
) -> Callable[[str, str], Saved]:
    """Saves the run of a place and an algorithm, the first time that it is asked for."""
    made: dict[tuple[str, str], Saved] = {}

    def get(place: str, sync: str) -> Saved:
        if (place, sync) not in made:
            run, folder = make(place, sync), folders.mktemp("run")
            state = run.trained(run.step.init(run.params), 0, SAVED)
            with Checkpoints(folder) as checkpoints:
                checkpoints.save(SAVED, state)
            then = run.values(state)
            made[place, sync] = Saved(run, folder, then, run.trained(state, SAVED, LAST))
        return made[place, sync]

    return get
