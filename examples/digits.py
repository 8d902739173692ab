"""Handwritten digits on four replicas that each see a quarter of the images.

A small CNN with BatchNorm, written in flax nnx, is trained under one of four algorithms and the
consensus of the replicas is evaluated on images that none of them has seen:

    python examples/digits.py --algorithm slowmo

The BatchNorm statistics are model state: `js.make_train_step` threads them through the loss
function and keeps them together as `--model-state` says. Needs flax and scikit-learn.
"""

import argparse
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import jaxslowmo as js

Algorithm = Literal["all_reduce", "local_sgd", "slowmo", "diloco"]
ModelStateMode = Literal["sync_mean", "broadcast", "local"]
Mesh = jax.sharding.Mesh | js.mesh.VirtualMesh
Batch = tuple[np.ndarray, np.ndarray]
ALGORITHMS: tuple[Algorithm, ...] = ("all_reduce", "local_sgd", "slowmo", "diloco")
MODEL_STATES: tuple[ModelStateMode, ...] = ("sync_mean", "broadcast", "local")


class Digits(NamedTuple):
    """Images (n, 8, 8, 1) in [0, 1] and labels (n,): a disjoint share per replica, and the rest."""

    shares: list[Batch]
    held_out: Batch


def split_digits(replicas: int, *, held_out: int = 360, seed: int = 0) -> Digits:
    """Shuffle the 1797 images, hold some out, deal the others to the replicas."""
    data = load_digits()
    images = (data.images / 16.0).astype(np.float32)[..., None]
    labels = data.target.astype(np.int32)
    order = np.random.default_rng(seed).permutation(len(labels))
    rest = order[held_out:]
    shares = [rest[replica::replicas] for replica in range(replicas)]
    test = order[:held_out]
    return Digits([(images[i], labels[i]) for i in shares], (images[test], labels[test]))


def batches(shares: list[Batch], batch_size: int, seed: int = 0) -> Iterator[Batch]:
    """Endless batches of `batch_size` examples from every share, one replica after the other."""
    rng = np.random.default_rng(seed)
    while True:
        drawn = [
            (images[i], labels[i])
            for images, labels in shares
            for i in [rng.integers(len(labels), size=batch_size)]
        ]
        yield np.concatenate([x for x, _ in drawn]), np.concatenate([y for _, y in drawn])


class CNN(nnx.Module):
    """Two convolutions with BatchNorm, one linear layer; about 10,000 parameters."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), strides=2, rngs=rngs)
        self.norm2 = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.head = nnx.Linear(4 * 4 * 32, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits (n, 10)."""
        x = nnx.relu(self.norm1(self.conv1(images)))
        x = nnx.relu(self.norm2(self.conv2(x)))
        return self.head(x.reshape(x.shape[0], -1))


def train_step(
    graphdef: nnx.GraphDef[CNN],
    algorithm: Algorithm,
    *,
    mesh: Mesh,
    learning_rate: float,
    model_state: ModelStateMode,
) -> js.train.TrainStep:
    """The step of one algorithm; the exchanges are its only difference."""

    def loss_fn(
        params: nnx.State, batch: tuple[jax.Array, jax.Array], *, model_state: nnx.State
    ) -> tuple[jax.Array, tuple[dict[str, jax.Array], Any]]:
        images, labels = batch
        # copy=True: the forward pass writes statistics, into variables of its own.
        model = nnx.merge(graphdef, params, model_state, copy=True)
        logits = model(images)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        accuracy = jnp.mean(jnp.argmax(logits, -1) == labels)
        return loss, ({"accuracy": accuracy}, nnx.state(model, nnx.BatchStat))

    gradients, sync = None, None
    if algorithm == "all_reduce":
        gradients = js.all_reduce_gradients("replica")
    elif algorithm == "local_sgd":
        sync = js.local_sgd("replica", sync_every=8)
    elif algorithm == "slowmo":
        base = js.local_sgd("replica", sync_every=8)
        sync = js.slowmo(
            "replica", base=base, sync_every=24, momentum=0.2, learning_rate=learning_rate
        )
    else:
        outer = js.algorithms.outer_nesterov()
        sync = js.diloco("replica", sync_every=20, outer_optimizer=outer)
    return js.make_train_step(
        loss_fn,
        optax.adam(learning_rate),
        gradients=gradients,
        sync=sync,
        mesh=mesh,
        model_state=model_state,
    )


def train(
    algorithm: Algorithm,
    *,
    mesh: Mesh,
    steps: int = 200,
    batch_size: int = 16,
    learning_rate: float = 3e-3,
    model_state: ModelStateMode = "sync_mean",
    seed: int = 0,
) -> float:
    """Accuracy of the consensus of the replicas of `mesh` on the held-out images, in [0, 1]."""
    digits = split_digits(mesh.shape["replica"], seed=seed)
    graphdef, params, statistics = nnx.split(CNN(rngs=nnx.Rngs(seed)), nnx.Param, nnx.BatchStat)
    step = train_step(
        graphdef, algorithm, mesh=mesh, learning_rate=learning_rate, model_state=model_state
    )
    state = step.init(params, model_state=statistics, seed=seed)
    for result in js.train_loop(step, state, batches(digits.shares, batch_size), num_steps=steps):
        state = result.state
    statistics = js.consensus(state.model_state, mesh=mesh)
    model = nnx.merge(graphdef, step.consensus(state), statistics)
    model.eval()  # BatchNorm uses the averaged statistics
    images, labels = digits.held_out
    return float(jnp.mean(jnp.argmax(model(images), -1) == labels))


def main() -> None:
    """Train one algorithm and print the accuracy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="slowmo")
    parser.add_argument("--model-state", choices=MODEL_STATES, default="sync_mean")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--virtual", action="store_true", help="replicas share one device")
    args = parser.parse_args()
    axes = {"replica": args.replicas}
    if not args.virtual:
        jax.config.update("jax_num_cpu_devices", args.replicas)  # counts where there is only a CPU
    mesh = js.virtual_mesh(axes) if args.virtual else js.make_mesh(axes)
    accuracy = train(args.algorithm, mesh=mesh, steps=args.steps, model_state=args.model_state)
    print(f"{args.algorithm}: {accuracy:.1%} of the held-out digits, {args.replicas} replicas")


if __name__ == "__main__":
    main()
