"""The time of a training step of a GPT, beside what XLA's compiler estimates on an H100.

    python benchmarks/bench_gpt_step.py --preset 124m --windows 8 --out step.json

AdamW, activations in bfloat16, gradients averaged over all devices, each of which is a replica.
`tests/support/gpu_estimates.py` says what the estimate is; there is none for other devices.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax
from machine import describe

import jaxslowmo as js
from jaxslowmo.models import gpt_loss_fn, gpt_preset, init_gpt

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support.gpu_estimates import read_estimate, text_with_estimates
from support.gpu_hosts import memory_bandwidth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="124m")
    parser.add_argument("--windows", type=int, default=8, help="per device")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    config = gpt_preset(arguments.preset)
    mesh = js.make_mesh({"replica": len(jax.devices())})
    step = js.make_train_step(
        gpt_loss_fn(config),
        optax.adamw(6e-4),
        gradients=js.all_reduce_gradients("replica"),
        mesh=mesh,
        mode="host",
        policy=js.Policy("bfloat16"),
    )
    shape = arguments.windows * mesh.size, config.context_length + 1
    windows = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    batch = jax.device_put(windows, jax.NamedSharding(mesh, jax.P("replica")))
    state = step.init(init_gpt(config))
    seconds = []
    for _ in range(3 + arguments.steps):  # the first ones compile and warm up
        began = time.perf_counter()
        state, _ = jax.block_until_ready(step(state, batch))
        seconds.append(time.perf_counter() - began)
    measured = 1e3 * statistics.median(seconds[3:])
    settings = {key: value for key, value in vars(arguments).items() if key != "out"}
    result = {"settings": settings, "machine": describe(), "milliseconds": round(measured, 3)}
    print(f"measured: {measured:.2f} ms a step; the first call took {seconds[0]:.1f} s", flush=True)
    if "H100" in jax.devices()[0].device_kind:
        (traced,) = step.traced_by_phase(state, batch).values()
        estimate = read_estimate(text_with_estimates(traced.lower()), memory_bandwidth("H100"))
        result["estimated milliseconds"] = round(estimate.step / 1e3, 3)
        print(f"estimated: {estimate.step / 1e3:.2f} ms, {estimate}")
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
