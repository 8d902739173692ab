"""The time of a training step of a GPT, beside what XLA's compiler estimates on an H100.

    python benchmarks/bench_gpt_step.py --preset 124m --windows 8 --attention cudnn --out step.json

AdamW, activations and products in bfloat16, gradients averaged over all devices, each of which is a
replica. `benchmarks/gpu_estimates.py` says what the estimate is; there is none for other
devices.

Beside the step stands a product of bfloat16 matrices on the same device. The step's products are
counted as 6 a parameter and token, and 12 a layer, width, token and token of the context before it
(PaLM's count, attention not halved). Dispatch is the time until a call returns, while the device
still computes.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from machine import describe

import jaxslowmo as js
from jaxslowmo.models import gpt_loss_fn, gpt_preset, init_gpt

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from gpu_estimates import read_estimate, text_with_estimates

from support.gpu_hosts import memory_bandwidth


def product_rate(size: int) -> float:
    """Return the TFLOP/s of a product of two square bfloat16 matrices of so many rows."""
    keys = jax.random.split(jax.random.key(0))
    left, right = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in keys)
    product = jax.jit(lambda x, y: x @ y)
    jax.block_until_ready(product(left, right))
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready([product(left, right) for _ in range(10)])
        seconds.append((time.perf_counter() - began) / 10)
    return 2e-12 * size**3 / statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="124m")
    parser.add_argument("--attention", default="xla", choices=("xla", "cudnn"))
    parser.add_argument("--windows", type=int, default=8, help="per device")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--product", type=int, default=8192, help="rows of the matrix beside it")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    config = gpt_preset(arguments.preset, dtype="bfloat16", attention=arguments.attention)
    mesh = js.make_mesh({"replica": len(jax.devices())})
    step = js.make_train_step(
        gpt_loss_fn(config),
        optax.adamw(6e-4),
        gradients=js.all_reduce_gradients("replica"),
        mesh=mesh,
        mode="host",
    )
    shape = arguments.windows * mesh.size, config.context_length + 1
    windows = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    batch = jax.device_put(windows, jax.NamedSharding(mesh, jax.P("replica")))
    state = step.init(init_gpt(config))
    num_parameters = sum(x[0].size for x in jax.tree.leaves(state.params))
    seconds, dispatches = [], []
    for _ in range(3 + arguments.steps):  # the first ones compile and warm up
        began = time.perf_counter()
        state, metrics = step(state, batch)
        dispatches.append(time.perf_counter() - began)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - began)
    measured = 1e3 * statistics.median(seconds[3:])
    tokens = arguments.windows * config.context_length
    attention = 12 * config.num_layers * config.embed_dim * config.context_length
    rate = (6 * num_parameters + attention) * tokens / (1e9 * measured)
    dispatch = 1e6 * statistics.median(dispatches[3:])
    products = product_rate(arguments.product)
    settings = {key: value for key, value in vars(arguments).items() if key != "out"}
    result = {
        "settings": settings,
        "machine": describe(),
        "milliseconds": round(measured, 3),
        "dispatch microseconds": round(dispatch, 1),
        "teraflops": round(rate, 1),
        "teraflops of a matrix product": round(products, 1),
    }
    print(f"measured: {measured:.2f} ms a step; the first call took {seconds[0]:.1f} s", flush=True)
    print(
        f"{tokens} tokens on a device: {rate:.0f} TFLOP/s, beside {products:.0f} of a product of "
        f"bfloat16 matrices; the host dispatches a step in {dispatch:.0f} us"
    )
    if "H100" in jax.devices()[0].device_kind:
        (traced,) = step.traced_by_phase(state, batch).values()
        estimate = read_estimate(text_with_estimates(traced.lower()), memory_bandwidth("H100"))
        result["estimated milliseconds"] = round(estimate.step / 1e3, 3)
        print(f"estimated: {estimate.step / 1e3:.2f} ms, {estimate}")
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
