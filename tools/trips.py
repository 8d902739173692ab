"""Which files a thought enters: counted, not guessed.

    python tools/trips.py          the table
    python tools/trips.py --files  and every file, in the order of the trip

Five trips, of functions that are called (modules that are only imported do not count):

* slow step: one update of `js.slowmo` over `js.local_sgd`, traced in the phase of its slow step.
* first call, compiled step: `step(state, batch)` of `js.make_train_step` with this algorithm, when
  it is called first, and when its program is compiled.
* gradient of a pipeline: `js.pipelined` of a schedule that does not split backward passes, and the
  trace of `jax.grad` of it.
* train: `jaxslowmo train`, from its configuration to the first collective that is traced.

Returns are counted from one file of the package to another. Where jax calls a function of the
package, as `jax.tree.map` does, its return to jax is none.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax

import jaxslowmo as js

PACKAGE = Path(js.__file__).parent
COLLECTIVES = {"psum", "pmean", "pmax", "all_gather", "psum_scatter", "ppermute", "all_to_all"}
# What the rest is written in: names of axes and facts about them, arithmetic of trees.
VOCABULARY = ("mesh", "tree")


class Trip(NamedTuple):
    """Where a trip went.

    Attributes:
      files: in order of first entry, relative to the package.
      returns: how often it came back to a file from another.
    """

    files: list[str]
    returns: int

    @property
    def above(self) -> list[str]:
        """The files that are not vocabulary."""
        return [file for file in self.files if file.split("/")[0] not in VOCABULARY]


class _ArrivedError(BaseException):
    """Ends a trip: not an `Exception`, which somebody on the way might handle."""


def follow(run: Callable[[], Any], *, to_collective: bool = False) -> Trip:
    """The trip of `run`, whole or to the first collective that is traced."""
    files: dict[str, None] = {}
    returns = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal returns
        del argument
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if event == "call" and to_collective and name in COLLECTIVES and "_src/lax" in path:
            back = frame.f_back.f_code.co_filename
            if back.startswith(str(PACKAGE)):  # `lax.axis_size` is one inside of jax
                sys.setprofile(None)
                raise _ArrivedError
        if not path.startswith(str(PACKAGE)) or name == "<module>":
            return
        if event == "call":
            files[str(Path(path).relative_to(PACKAGE))] = None
        elif event == "return" and frame.f_back:
            back = frame.f_back.f_code.co_filename
            returns += back != path and back.startswith(str(PACKAGE))

    sys.setprofile(note)
    try:
        run()
    except _ArrivedError:
        pass
    finally:
        sys.setprofile(None)
    return Trip(list(files), returns)


def slow_step() -> Trip:
    """One slow step of slowmo, traced; its state was made before, as always."""
    base = js.local_sgd("replica", sync_every=2)
    tx = js.slowmo("replica", base=base, sync_every=4, learning_rate=0.1)
    params = {"w": jnp.ones((4, 8, 8)), "b": jnp.ones((4, 8))}
    state = jax.vmap(tx.init, axis_name="replica")(params)

    def update(updates: Any, state: Any, params: Any) -> Any:
        return tx.update(updates, state, params, phase=("slow",))

    over_replicas = jax.vmap(update, axis_name="replica")
    return follow(lambda: jax.make_jaxpr(over_replicas)(params, state, params))


def calls() -> dict[str, Trip]:
    """The first call of a training step with slowmo, and one of which all is compiled."""
    base = js.local_sgd("replica", sync_every=2)
    sync = js.slowmo("replica", base=base, sync_every=4, learning_rate=0.1)
    mesh = js.make_mesh({"replica": 4})
    step = js.make_train_step(
        lambda params, batch: jnp.mean((batch @ params["w"] + params["b"]) ** 2),
        optax.adamw(0.1),
        sync=sync,
        mesh=mesh,
    )
    batch = jax.device_put(jnp.ones((8, 8)), jax.NamedSharding(mesh, jax.P("replica")))
    state = step.init({"w": jnp.ones((8, 8)), "b": jnp.ones(8)})

    def call() -> None:
        nonlocal state
        state, _ = step(state, batch)

    first = follow(call)
    call()
    return {"first call": first, "compiled step": follow(call)}


def pipeline() -> Trip:
    """A pipeline of four layers on four stages, made, and its gradient, traced."""
    params = [{"w": jnp.ones((8, 8))}] * 4
    model = js.LayeredModel([lambda p, x: x @ p["w"]] * 4, lambda y, batch: jnp.mean(y**2))
    schedule, mesh = js.schedules.one_f_one_b(4, 4), js.make_mesh({"stage": 4})

    def gradient() -> None:
        pipe = js.pipelined(model, params, schedule, mesh=mesh)
        jax.make_jaxpr(jax.grad(pipe))(pipe.layout.types, jnp.ones((8, 8)))

    return follow(gradient)


def train(algorithm: str) -> Trip:
    """From the configuration of `jaxslowmo train` to the first collective."""
    import jaxslowmo.cli._run as command
    from jaxslowmo.cli import main

    found: list[Trip] = []
    real = command.train

    def followed(config: Any) -> int:
        found.append(follow(lambda: real(config), to_collective=True))
        return 0

    with tempfile.TemporaryDirectory() as folder:
        command.train = followed
        arguments = [
            "train",
            "--preset",
            "tiny",
            "--algorithm",
            algorithm,
            "--out",
            f"{folder}/run",
        ]
        try:
            main(arguments)
        except SystemExit:
            pass
        finally:
            command.train = real
    return found[0]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", action="store_true", help="print every file")
    files = parser.parse_args().files
    jax.config.update("jax_num_cpu_devices", 8)
    trips = {"slow step of slowmo": slow_step(), **calls(), "gradient of a pipeline": pipeline()}
    for algorithm in ("slowmo", "local_sgd", "all_reduce"):
        trips[f"train, {algorithm}"] = train(algorithm)
    print("trip | files | without mesh/ and tree/ | returns to another file")
    for name, trip in trips.items():
        print(f"{name} | {len(trip.files)} | {len(trip.above)} | {trip.returns}")
        for file in trip.files if files else ():
            print(f"    {file}")


if __name__ == "__main__":
    main()
