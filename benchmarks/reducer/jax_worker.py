"""One JAX process of the reducer benchmark: collectives over gloo between processes.

One program makes the gradients by a multiplication per leaf, another reduces them in their place
(they are donated). Two, because in one the compiler fuses the multiplications into the packing,
which it cannot do with the matrix products that a real backward pass ends in. Timed are both calls
until all results are there.
"""

import os
import sys

import jax

port, rank, world, model = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 1)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", world, rank, initialization_timeout=120)

import numpy as np  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from machine import describe  # noqa: E402
from shapes import gradients, relative_error  # noqa: E402
from turns import Timed, serve  # noqa: E402

import jaxslowmo as js  # noqa: E402

MESH = js.make_mesh({"replica": world})
SPLIT = NamedSharding(MESH, P("replica"))
APART = {"xla_disable_hlo_passes": "cpu-all-reduce-combiner"}


def spread(x: np.ndarray) -> jax.Array:
    """This process's value as its part of an array over all of them."""
    own = jax.device_put(x[None], jax.local_devices()[0])
    return jax.make_array_from_single_device_arrays((world, *x.shape), SPLIT, [own])


CONSTANTS = [spread(g) for g in gradients(model, rank)]
SCALE = spread(np.ones((), np.float32))


def transform(name: str, flags: list[str]):
    """`(init, update)` of a variant; None for gradients that are made and not reduced."""
    kind, *arguments = name.split()
    if kind == "none":
        return None
    if kind == "psum":
        return (lambda grads: ()), lambda grads, state: (lax.pmean(grads, "replica"), state)
    options = {"bucket_bytes": int(float(arguments[0]) * 2**20)} if kind == "cap" else {}
    if "alone" in flags:
        options["alone_bytes"] = 2**20
    if kind == "hook":
        options["hook"] = hook(*arguments)
    made = js.all_reduce_gradients("replica", **options)
    return made.init, lambda grads, state: made.update(grads, state)


def hook(kind: str, *arguments: str):
    if kind == "powersgd":
        return js.hooks.powersgd(rank=int(arguments[0]), start_step=2)
    return getattr(js.hooks, kind)(*[float(x) for x in arguments])


def mapped(f, num: int, **options):
    """`f` of `num` trees, compiled for all processes; its arrays are stacked over them."""
    spec = P("replica")
    return jax.jit(
        jax.shard_map(f, mesh=MESH, in_specs=(spec,) * num, out_specs=spec, check_vma=False),
        **options,
    )


MAKE = mapped(lambda scale, constants: [scale * c for c in constants], 2)


def prepare(name: str):
    base, *flags = name.split(", ")
    pair, state, text = transform(base, flags), (), ""

    def init(grads):
        state = pair[0]([g[0] for g in grads]) if pair else ()
        return jax.tree.map(lambda x: x[None], state)

    def update(grads, state):
        out = pair[1]([g[0] for g in grads], jax.tree.map(lambda x: x[0], state))
        return jax.tree.map(lambda x: x[None], out)

    grads = MAKE(SCALE, CONSTANTS)
    if pair:
        state = mapped(init, 1)(grads)
        lowered = mapped(update, 2, donate_argnums=(0, 1)).lower(grads, state)
        reduce = lowered.compile(compiler_options=APART if "apart" in flags else None)

    def step(timed: Timed):
        nonlocal state
        with timed:
            grads = MAKE(SCALE, CONSTANTS)
            if pair:
                grads, state = reduce(grads, state)
            jax.block_until_ready(grads)
        return grads

    for _ in range(4):
        grads = step(Timed())
    own = [np.asarray(g.addressable_data(0))[0] for g in grads]
    if pair:
        text = reduce.as_text()
    if dump := os.environ.get("DUMP_HLO"):
        with open(f"{dump}/{model}-{name.replace(' ', '_')}.txt", "w") as file:
            file.write(text)
    names = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
    found = {n: text.count(f" {n}(") + text.count(f" {n}-start(") for n in names}
    return step, {
        "error": relative_error(own, model, world),
        "collectives": {n: count for n, count in found.items() if count},
    }


serve(prepare, describe())
os._exit(0)
