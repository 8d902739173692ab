"""Bandwidth of updates beside that of a copy on the same device.

    python benchmarks/bench_update.py --megabytes 1000 --out update.json

An update is bound by memory: it reads and writes parameters, gradients and state, and computes
little. Its bytes are those of all arguments and of all results, each counted once. The copy reads
one buffer and writes another. All take turns, and a cell is the median over rounds. A ratio below 1
is what an update loses, such as by packing leaves into a buffer and unpacking them again.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from machine import describe

import jaxslowmo as js

REPLICAS = 2
CALLS = 5  # in a row, so that a program waits for the one before and not for the host


class Update(NamedTuple):
    """A function `run(state, kept)` that returns the next state, its first state and the rest."""

    run: Callable[[Any, Any], Any]
    state: Any
    kept: Any = None


def leaves_of(megabytes: float, count: int, value: float = 0.0) -> list[jax.Array]:
    """Return `count` float32 arrays of together so many MB."""
    rows = max(1, round(megabytes * 1e6 / 4 / 1024 / count))
    return [jnp.full((rows, 1024), value) for _ in range(count)]


def num_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def optimizer(transform: optax.GradientTransformation, params: Any, grads: Any) -> Update:
    def run(state: Any, grads: Any) -> Any:
        params, inner = state
        changes, inner = transform.update(grads, inner, params)
        return optax.apply_updates(params, changes), inner

    return Update(run, (jax.tree.map(jnp.copy, params), transform.init(params)), grads)


def exchange(sync: js.ParameterTransform, phase: str, params: Any) -> Update:
    """Return the step of a transform, of virtual replicas on this device."""
    lift = partial(jax.vmap, axis_name="replica")
    params = jax.tree.map(lambda x: jnp.stack([x] * REPLICAS), params)

    def run(state: Any, _: None) -> Any:
        params, inner = state
        zeros = jax.tree.map(jnp.zeros_like, params)
        changes, inner = lift(partial(sync.update, phase=(phase,)))(zeros, inner, params)
        return optax.apply_updates(params, changes), inner

    return Update(run, (params, lift(sync.init)(params)))


def coded(codec: js.codecs.Codec, x: jax.Array) -> Update:
    """Return what a replica computes to send a row of parameters to each of others, and to read."""
    rows = x.reshape(REPLICAS, -1)
    return Update(lambda _, x: codec.decode(codec.encode(x), x.shape[1]), None, rows)


CODECS = {
    "bfloat16": js.codecs.bfloat16(),
    "int8": js.codecs.int8(),
    "fp8": js.codecs.fp8(),
    "int4": js.codecs.int4(),
    "top_k(0.02)": js.codecs.top_k(0.02),
    "top_k(0.02), 2 bits": js.codecs.top_k(0.02, values="bits2"),
}


def updates(megabytes: float, count: int) -> dict[str, Update]:
    """Return the updates by name; all of them together hold 40 times so many MB."""
    params, grads = leaves_of(megabytes, count), leaves_of(megabytes, count, 1e-3)
    part = leaves_of(megabytes / REPLICAS, count)
    average = js.local_sgd("replica", sync_every=1)
    slow = partial(js.slowmo, "replica", base=average, sync_every=1)
    flat = leaves_of(megabytes, 1)[0]
    # Values that all differ, for the search of the largest.
    flat = jnp.sin(jnp.arange(flat.size, dtype=jnp.float32)).reshape(flat.shape)
    return {
        "copy": Update(lambda _, x: jnp.copy(x), None, leaves_of(megabytes, 1)[0]),
        "sgd with momentum": optimizer(optax.sgd(0.1, momentum=0.9), params, grads),
        "adamw": optimizer(optax.adamw(1e-3), params, grads),
        "local_sgd: average": exchange(average, "average", part),
        "slowmo: slow step": exchange(slow(shard_state=False), "slow", part),
        "slowmo: slow step, sharded": exchange(slow(), "slow", part),
        "slowmo: slow step in int4": exchange(slow(codec=CODECS["int4"]), "slow", part),
        **{f"{name}: encode, decode": coded(codec, flat) for name, codec in CODECS.items()},
    }


class Turn:
    """An update that is called again and again."""

    def __init__(self, update: Update) -> None:
        self._run = jax.jit(update.run, donate_argnums=0)
        self._state, self._kept = update.state, update.kept
        # A copy has no state: its result is dropped.
        self._has_state = update.state is not None
        read = num_bytes((self._state, self._kept))
        self.num_bytes = read + num_bytes(jax.eval_shape(self._run, self._state, self._kept))
        self.seconds: list[float] = []

    def call(self) -> None:
        began, result = time.perf_counter(), None
        for _ in range(CALLS):
            result = self._run(self._state, self._kept)
            self._state = result if self._has_state else None
        jax.block_until_ready(result)
        self.seconds.append((time.perf_counter() - began) / CALLS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=64, help="of the parameters")
    parser.add_argument("--leaves", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    turns = {
        name: Turn(update)
        for name, update in updates(arguments.megabytes, arguments.leaves).items()
    }
    for _ in range(1 + arguments.rounds):  # the first one compiles
        for turn in turns.values():
            turn.call()
    rows = []
    copied = turns["copy"]
    for name, turn in turns.items():
        rates = [turn.num_bytes / seconds for seconds in turn.seconds[1:]]
        ratios = [
            rate * seconds / copied.num_bytes
            for rate, seconds in zip(rates, copied.seconds[1:], strict=True)
        ]
        rows.append(
            {
                "update": name,
                "megabytes moved": round(turn.num_bytes / 1e6, 1),
                "milliseconds": round(1e3 * statistics.median(turn.seconds[1:]), 3),
                "gigabytes per second": round(statistics.median(rates) / 1e9, 1),
                "of the copy's": round(statistics.median(ratios), 3),
            }
        )
        print("  ".join(f"{key}: {value}" for key, value in rows[-1].items()), flush=True)
    if arguments.out:
        settings = {key: value for key, value in vars(arguments).items() if key != "out"}
        result = {"settings": settings, "machine": describe(), "rows": rows}
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
