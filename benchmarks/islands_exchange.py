"""Memory and time that an exchange of islands takes on the host.

    .venv/bin/python benchmarks/islands_exchange.py --parameters 100000000

One island of one replica on the default device, SGD without momentum inside, alone in its run, over
a folder. The peak is that of the process (VmHWM) over the exchanges, less what it held before it
had parameters, in multiples of the model in float32; on a CPU the replica's own parameters are one
of it. The time is the median exchange, in sums of two such models by NumPy in the same process.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxslowmo as js

OUTER = {"sgd": optax.sgd(0.7, momentum=0.9, nesterov=True), "adamw": optax.adamw(1e-2)}
CODECS = {"float32": None, "int8": js.codecs.int8(), "int4": js.codecs.int4()}
EXCHANGES = 3


def kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def seconds_of(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(outer: str, codec: str, parameters: int) -> str:
    jax.block_until_ready(jnp.zeros(1))  # what the device's libraries take is not the exchange's
    held, times = kilobytes("VmRSS"), []
    with tempfile.TemporaryDirectory() as folder:
        island = js.islands.join(
            folder, name="one", sync_every=1, outer_optimizer=OUTER[outer], codec=CODECS[codec]
        )
        step = js.make_train_step(
            lambda params, batch: sum(jnp.sum(x) for x in params) * jnp.mean(batch),
            optax.sgd(0.01),
            mesh=js.virtual_mesh({"replica": 1}),
            sync=island.transform(),
        )
        params = [np.zeros(parameters // 5, np.float32) for _ in range(5)]
        state = island.exchange(step.init(params))
        del params
        for _ in range(EXCHANGES):
            state, _ = jax.block_until_ready(step(state, np.ones(1, np.float32)))
            start = time.perf_counter()
            state = jax.block_until_ready(island.exchange(state))
            times.append(time.perf_counter() - start)
    models = (kilobytes("VmHWM") - held) * 1024 / (4 * parameters)
    x, out = np.ones(parameters, np.float32), np.ones(parameters, np.float32)
    a_sum = statistics.median(seconds_of(lambda: np.add(x, x, out=out)) for _ in range(5))
    exchange = statistics.median(times)
    return (
        f"{outer}, {codec}: peak {models:.1f} models of float32, "
        f"exchange {exchange / a_sum:.0f} sums ({exchange:.2f} s)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--case", nargs=2, metavar=("OUTER", "CODEC"))
    args = parser.parse_args()
    if args.case:
        print(measure(*args.case, args.parameters), flush=True)
        return
    for case in (("sgd", "float32"), ("adamw", "float32"), ("sgd", "int8"), ("sgd", "int4")):
        command = [sys.executable, __file__, "--case", *case, "--parameters", f"{args.parameters}"]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
