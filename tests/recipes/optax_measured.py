"""What is left of an average some updates later, and the table of those that need care."""

import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxslowmo as js
from jaxslowmo.transform import moving_states
from recipes.optax_cases import CASES, Case, names_of, parameters

SYNC_AT = 4  # the update that averages; SAM is back from its steps then
AFTER = 2  # updates with equal gradients after it
REPLICAS = 2
RNG = np.random.default_rng(0)
BATCHES = RNG.normal(size=(SYNC_AT + AFTER, 8 * REPLICAS, 5)).astype(np.float32)
MESH = js.virtual_mesh({"replica": REPLICAS})
PERIOD = 100


class Measured(NamedTuple):
    """What a training step with `sync=js.local_sgd(...)` did.

    Attributes:
      spread: largest difference between replicas before the average would have been.
      together: after it.
      left: of what it moved, the part that is left after updates with equal gradients.
      moved: state classes whose copies moved along.
    """

    spread: float
    together: float
    left: float
    moved: list[str]


def loss(params: Any, batch: Any) -> jax.Array:
    """Return the loss of data that differ between replicas, or by `scale` and `slope` do not."""
    params = getattr(params, "fast", params)
    x, scale, slope = batch
    own = jnp.mean((jnp.tanh(x @ params["w"] + params["b"][None]) - 0.5) ** 2, axis=1)
    return jnp.mean(own * scale) + slope.mean() * sum(jnp.sum(p) for p in params.values())


def batch_of(case: Case, x: np.ndarray, *, has_data: bool = True) -> Any:
    """What `loss` wants; without data gradients are the same everywhere."""
    scale = np.full(len(x), has_data, np.float32)
    # Not zero: SAM divides by its norm.
    slope = np.full(len(x), 0 if case.is_search else 0.01, np.float32)
    return x, scale, slope


def started(case: Case) -> tuple[js.train.TrainStep, js.TrainState]:
    """A step that averages at some later time, and its state."""
    sync = js.local_sgd("replica", sync_every=PERIOD)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations of optax
        step = js.make_train_step(loss, case.make(), sync=sync, mesh=MESH, donate=False)
        return step, step.init(parameters(case))


def measured(case: Case) -> Measured:
    """The same run twice, once with an average, by the same program."""
    step, fresh = started(case)
    # Another count, and the average is due.
    runs = [fresh, fresh._replace(step=fresh.step + PERIOD - SYNC_AT)]
    history = []
    for t, x in enumerate(BATCHES, start=1):
        batch = batch_of(case, x, has_data=t <= SYNC_AT)
        runs = [step(state, batch)[0] for state in runs]
        history.append([np.concatenate(_flat(state.params), axis=1) for state in runs])
    apart, averaged = history[SYNC_AT - 1]
    d = averaged - apart
    after = history[-1][1] - history[-1][0]
    left = float(np.sum(after * d) / np.sum(d * d))
    spreads = [float(np.ptp(x, axis=0).max()) for x in (apart, averaged)]
    return Measured(*spreads, left, moving_states(fresh.opt_state))


def _flat(params: Any) -> list[np.ndarray]:
    return [np.asarray(x).reshape(REPLICAS, -1) for x in jax.tree.leaves(params)]


def is_known(module: str, name: str) -> bool:
    """Whether the installed version of optax has this name."""
    return name in names_of(module)


def table() -> str:
    """Return the table of the names that need care, as the page shows it, by what to know."""
    names: dict[str, list[str]] = {}
    for module, cases in CASES.items():
        prefix = "contrib." if module == "optax.contrib" else ""
        for name, case in sorted(cases.items()):
            if case.condition:
                names.setdefault(case.condition, []).append(f"`{prefix}{name}`")
    rows = [f"| {', '.join(shown)} | {said} |" for said, shown in names.items()]
    return "\n".join(["| Name | With `sync=` |", "|---|---|", *rows])
