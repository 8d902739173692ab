"""Memory of the host in an exchange of islands, in multiples of the model in float32.

    .venv/bin/python benchmarks/islands_memory.py --parameters 25000000

One island of one replica on the CPU, SGD without momentum inside, over a folder. The peak is that
of the process (VmHWM) over two exchanges, less what it held before it had parameters; the replica's
own parameters, in the host's memory here, are one of it.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax

import jaxslowmo as js

OUTER = {"sgd": optax.sgd(0.7, momentum=0.9, nesterov=True), "adamw": optax.adamw(1e-2)}


def kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def measure(outer: str, parameters: int) -> float:
    """Return the peak in models of float32."""
    held = kilobytes("VmRSS")
    with tempfile.TemporaryDirectory() as folder:
        island = js.islands.join(folder, name="one", sync_every=1, outer_optimizer=OUTER[outer])
        step = js.make_train_step(
            lambda params, batch: sum(jnp.sum(x) for x in params) * jnp.mean(batch),
            optax.sgd(0.01),
            mesh=js.virtual_mesh({"replica": 1}),
        )
        params = [np.zeros(parameters // 5, np.float32) for _ in range(5)]
        state = island.exchange(step.init(params))
        del params
        for _ in range(2):
            state, _ = step(state, np.ones(1, np.float32))
            state = island.exchange(state)
    return (kilobytes("VmHWM") - held) * 1024 / (4 * parameters)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=25_000_000)
    parser.add_argument("--outer", choices=OUTER)
    args = parser.parse_args()
    if args.outer:
        print(f"{args.outer}: {measure(args.outer, args.parameters):.1f} models of float32")
        return
    for outer in OUTER:
        command = [sys.executable, __file__, "--outer", outer, "--parameters", f"{args.parameters}"]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
