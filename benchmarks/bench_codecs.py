"""What 16 bits cost in quality: one run per algorithm and codec, against the run in float32.

    python benchmarks/bench_codecs.py

Eight virtual replicas train a perceptron on scikit-learn's digits. Printed are the loss of the
consensus on the training and the test set, and how far its parameters ended from those of the run
without a codec, relative, over all parameters.
"""

import argparse
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxslowmo as js

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--steps", type=int, default=640)
PARSER.add_argument("--replicas", type=int, default=8)
LEARNING_RATE, TRAINED_ON, PER_REPLICA = 1e-3, 1500, 8

Make = Callable[[js.codecs.Codec | None], js.ParameterTransform]


def anchored(every: int, outer: optax.GradientTransformation | None = None) -> Make:
    return lambda codec: js.diloco(
        "replica", sync_every=every, outer_optimizer=outer, shard_state=False, codec=codec
    )


ALGORITHMS: dict[str, Make] = {
    "local_sgd, every 4": lambda codec: js.local_sgd("replica", sync_every=4, codec=codec),
    "the same with an anchor": anchored(4, optax.sgd(1.0)),
    "sgp on a ring": lambda codec: js.sgp("replica", graph=js.topology.ring, codec=codec),
    "diloco, every 16": anchored(16),
}
CODECS = {
    "float32": None,
    "float16": js.codecs.float16(),
    "float16, error feedback": js.codecs.float16(error_feedback=True),
    "bfloat16": js.codecs.bfloat16(),
    "bfloat16, error feedback": js.codecs.bfloat16(error_feedback=True),
}


def digits() -> tuple[np.ndarray, np.ndarray]:
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    return (images[order] / 16).astype(np.float32), labels[order]


def initial() -> dict[str, jax.Array]:
    sizes = (64, 128, 128, 10)
    keys = jax.random.split(jax.random.key(0), len(sizes) - 1)
    shapes = zip(keys, sizes, sizes[1:], strict=False)
    return {f"{i}": jax.random.normal(k, (m, n)) / m**0.5 for i, (k, m, n) in enumerate(shapes)}


def loss(params: dict[str, jax.Array], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    x, labels = batch
    hidden = jnp.tanh(jnp.tanh(x @ params["0"]) @ params["1"])
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["2"], labels).mean()


def trained(sync: js.ParameterTransform, args: argparse.Namespace) -> dict[str, np.ndarray]:
    """The consensus after all steps."""
    images, labels = digits()
    mesh = js.virtual_mesh({"replica": args.replicas})
    step = js.make_train_step(loss, optax.adam(LEARNING_RATE), sync=sync, mesh=mesh, mode="host")
    state, draws = step.init(initial()), np.random.default_rng(1)
    for _ in range(args.steps):
        which = draws.integers(0, TRAINED_ON, args.replicas * PER_REPLICA)
        state, _ = step(state, (images[which], labels[which]))
    return jax.tree.map(lambda x: np.asarray(x, np.float64).mean(0), state.params)


def flat(params: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([x.ravel() for x in jax.tree.leaves(params)])


def main() -> None:
    args = PARSER.parse_args()
    images, labels = digits()
    print("algorithm | codec | training loss | test loss | distance")
    for name, make in ALGORITHMS.items():
        reference = None
        for codec_name, codec in CODECS.items():
            found = trained(make(codec), args)
            reference = flat(found) if reference is None else reference
            params = jax.tree.map(jnp.float32, found)
            losses = [
                float(loss(params, (images[part], labels[part])))
                for part in (slice(TRAINED_ON), slice(TRAINED_ON, None))
            ]
            off = np.linalg.norm(flat(found) - reference) / np.linalg.norm(reference)
            shown = " | ".join(f"{x:.4f}" for x in losses)
            print(f"{name} | {codec_name} | {shown} | {off:.3%}", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
