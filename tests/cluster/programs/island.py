"""Train a small network until a round, as an island or as a host of a group with js.diloco.

    python island.py island --name c --url s3://bucket/run --folder /tmp/c --until /tmp/last
    python island.py group --name 2 --url 192.0.2.1:9911 --folder /tmp/all --until /tmp/last

Both make the same updates: two replicas per host, an outer step after every `--sync-every` updates.
It goes on from its newest checkpoint in the folder. Every line on standard output is a JSON object
with `t`, seconds since 1970: what begins or ends now (`mark`), or, with `step`, what was done.
"""

import argparse
import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BORN = time.time()
FACTS = os.dup(1)
os.dup2(2, 1)  # gloo writes to descriptor 1 in parts of lines

import jax  # noqa: E402

REPLICAS, WIDTHS, BATCH = 2, (64, 288, 288, 32), 16  # 110,592 parameters, 442 kB as float32
GROUP = 4
R = "replica"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("island", "group"))
    parser.add_argument("--name", required=True, help="of the island, or the host's number")
    parser.add_argument("--url", required=True, help="of the run, or the coordinator's address")
    parser.add_argument("--folder", required=True, help="of checkpoints")
    parser.add_argument("--until", type=Path, required=True, help="file with the last round")
    parser.add_argument("--sync-every", type=int, default=100)
    parser.add_argument("--delay", type=int, default=0, help="updates beside an exchange")
    parser.add_argument("--step-seconds", type=float, default=0.05, help="an update takes at least")
    parser.add_argument("--deadline", type=float, default=1.0)
    parser.add_argument("--late", default="carry")
    parser.add_argument("--snapshot-every", type=int, default=2)
    return parser.parse_args()


ARGS = parse()
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", REPLICAS)
if ARGS.kind == "group":
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        ARGS.url, GROUP, int(ARGS.name), initialization_timeout=120, heartbeat_timeout_seconds=10
    )

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import jaxslowmo as js  # noqa: E402
from jaxslowmo.checkpoint import Checkpoints  # noqa: E402


def tell(**facts: Any) -> None:
    """One write, so that a reader sees it at once and whole."""
    os.write(FACTS, (json.dumps({"t": time.time(), **facts}) + "\n").encode())


def is_last(number: int) -> bool:
    """Whether the run ends here; while the file is missing it goes on."""
    return ARGS.until.exists() and number >= int(ARGS.until.read_text())


class Marked:
    """A bucket that tells what begins and ends."""

    def __init__(self, bucket: Any) -> None:
        self._object_store = bucket
        self.delete, self.list, self.refusals = bucket.delete, bucket.list, bucket.refusals
        self.timeout_seconds = bucket.timeout_seconds

    def get(self, key: str, limit: int | None) -> bytes:
        if "/part-" in key:
            tell(mark="reading begins", key=key)
        return self._object_store.get(key, limit)

    def create(self, key: str, data: bytes) -> None:
        self._marked("create", key, data)

    def put(self, key: str, data: bytes) -> None:
        self._marked("put", key, data)

    def _marked(self, method: str, key: str, data: bytes) -> None:
        what = next((x for x in ("part", "manifest", "snapshot") if x in key), "other")
        tell(mark=f"{what} begins", key=key)
        try:
            getattr(self._object_store, method)(key, data)
        except FileExistsError:
            tell(mark=f"{what} was there", key=key)
            raise
        tell(mark=f"{what} ends", key=key)


def anchor_of(island: js.islands.Island) -> tuple[int, str]:
    """The round and the digest of the anchor from which an island trains."""
    assert island._rounds is not None
    return island._rounds.anchor.round, island._rounds.anchor.digest


def first_params() -> dict[str, np.ndarray]:
    rng, pairs = np.random.default_rng(0), itertools.pairwise(WIDTHS)
    return {
        f"w{i}": (rng.normal(size=pair) / np.sqrt(pair[0])).astype(np.float32)
        for i, pair in enumerate(pairs)
    }


def loss_fn(params: Any, batch: Any) -> jax.Array:
    x, y = batch
    for name in sorted(params)[:-1]:
        x = jnp.tanh(x @ params[name])
    return jnp.mean((x @ params[sorted(params)[-1]] - y) ** 2)


def batches(seed: int, step: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Those after a step: other ones for each island, and the same ones after a restart."""
    teacher = np.random.default_rng(1).normal(size=(WIDTHS[0], WIDTHS[-1])) / np.sqrt(WIDTHS[0])
    due = time.monotonic()
    while True:
        step += 1
        x = np.random.default_rng([seed, step]).normal(size=(REPLICAS * BATCH, WIDTHS[0]))
        # As on an accelerator, an update takes time, and this machine's processors little of it.
        due = max(due, time.monotonic() - ARGS.step_seconds) + ARGS.step_seconds
        time.sleep(max(0.0, due - time.monotonic()))
        yield x.astype(np.float32), np.tanh(x @ teacher).astype(np.float32)


class Act:
    """A hook that calls a function without arguments."""

    def __init__(self, every: Any, act: Any) -> None:
        self.every, self._act = every, act

    def __call__(self, result: Any) -> None:
        self._act(result)


def main() -> None:
    island: js.islands.Island | None = None
    hooks: list[Any] = []
    if ARGS.kind == "island":
        island = js.islands.join(
            ARGS.url, name=ARGS.name, sync_every=ARGS.sync_every, deadline_seconds=ARGS.deadline,
            late=ARGS.late, snapshot_every=ARGS.snapshot_every, keep=None, delay=ARGS.delay,
        )  # fmt: skip
        assert island._store is not None
        island._store._object_store = Marked(island._store._object_store)
        mesh, sync, seed = js.make_mesh({R: REPLICAS}), island.transform(), sum(ARGS.name.encode())
    else:
        mesh, seed = js.make_mesh({R: GROUP * REPLICAS}), int(ARGS.name)
        sync = js.diloco(R, sync_every=ARGS.sync_every)
    step = js.make_train_step(loss_fn, optax.sgd(0.05, momentum=0.9), mesh=mesh, sync=sync)
    params, split = first_params(), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(R))
    clock = {"waiting": 0.0, "saving": 0.0, "training": 0.0}
    last = [time.time()]

    def lap(what: str) -> None:
        now = time.time()
        clock[what] += now - last[0]
        last[0] = now

    def exchange_begins(result: Any) -> None:
        jax.block_until_ready(result.state.params)
        lap("training")
        tell(mark="exchange begins", step=result.step)

    def progress(result: Any) -> int:
        """Tell where the run is, and return the round."""
        rounded = {name: round(seconds, 3) for name, seconds in clock.items()}
        if island is None:
            number, digest = result.step // ARGS.sync_every, None
        else:
            number, digest = anchor_of(island)
        loss = float(js.host_mean(result.metrics)["loss"])
        tell(step=result.step, round=number, digest=digest, loss=round(loss, 6), **rounded)
        return number

    with Checkpoints(ARGS.folder, keep=2) as checkpoints:
        if checkpoints.steps():
            restored = checkpoints.restore(step, params)
            state, done = restored.state, restored.step
        else:
            state, done = step.init(params), 0
        if island is not None:
            state = island.exchange(state)
            every = island.every
            hooks = [Act(every, exchange_begins), island, Act(every, lambda _: lap("waiting"))]
            number, digest = anchor_of(island)
            tell(mark="joined", step=done, round=number, digest=digest)
            if is_last(number):
                return
        tell(mark="trains", step=done, seconds=round(time.time() - BORN, 3))
        last[0] = time.time()

        def placed() -> Iterator[Any]:
            for batch in batches(seed, done):
                yield jax.tree.map(
                    lambda x: jax.make_array_from_process_local_data(split, x), batch
                )

        for result in js.train_loop(step, state, placed(), hooks=hooks):
            if result.step % ARGS.sync_every:
                continue
            jax.block_until_ready(result.state.params)
            lap("training")
            tell(mark="checkpoint begins", step=result.step)
            checkpoints.save(result.step, result.state)
            lap("saving")
            if is_last(progress(result)):
                break
    tell(mark="done")


if __name__ == "__main__":
    main()
