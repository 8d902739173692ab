"""The DLRM's step, batches and scores; devices share its tables, and their exchange runs ahead."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import numpy as np
import optax
from figure import Curve
from flax import nnx
from flights import CATEGORICAL, DENSE, Flights, Split
from model import DLRM
from sklearn.metrics import roc_auc_score

import jaxslowmo as js

Mode = Literal["plain", "exact", "stale", "patched"]
Shard = Literal["row", "column", "table"]
Algorithm = Literal["all_reduce", "local_sgd", "slowmo"]
Batch = dict[str, Any]
FEATURES = [*CATEGORICAL, "earlier"]
SCORED_AT_ONCE = 4096


@dataclasses.dataclass(frozen=True)
class Options:
    """What a run is told.

    Attributes:
      mode: what of the next batch is exchanged beside a step; "plain": nothing, and nothing is
        loaded ahead either.
      shard: of all tables.
      algorithm: what replicas exchange.
      epochs: passes over the training flights.
      batch_size: flights of all replicas.
      dim: of the vectors.
      learning_rate: of Adam, for the dense part; it falls to 0 along a cosine.
      table_rate: of row-wise Adagrad, likewise.
      seed: of parameters, tables and the order of the flights.
      steps: at most so many; 0: all.
      scores: how often the flights of validation and test are scored.
    """

    mode: Mode = "exact"
    shard: Shard = "row"
    algorithm: Algorithm = "all_reduce"
    epochs: int = 1
    batch_size: int = 512
    dim: int = 16
    learning_rate: float = 2e-3
    table_rate: float = 0.05
    seed: int = 0
    steps: int = 0
    scores: int = 8


def make_step(
    graphdef: nnx.GraphDef[DLRM],
    embeddings: js.embedding.Embeddings,
    mesh: jax.sharding.Mesh,
    options: Options,
    num_steps: int,
) -> js.train.TrainStep:
    """The step of one algorithm; between replicas the tables follow it as the dense part does."""

    def loss_fn(params: nnx.State, batch: Batch, *, embedded: dict[str, jax.Array]) -> jax.Array:
        logits = nnx.merge(graphdef, params)(batch["dense"], embedded)
        return optax.sigmoid_binary_cross_entropy(logits, batch["late"]).mean()

    gradients, sync = None, None
    are_several = mesh.shape["replica"] > 1
    if are_several and options.algorithm == "all_reduce":
        gradients = js.all_reduce_gradients("replica")
    elif are_several:
        sync = js.local_sgd("replica", sync_every=8)
        if options.algorithm == "slowmo":
            sync = js.slowmo("replica", base=sync, sync_every=32, momentum=0.3)
    return js.make_train_step(
        loss_fn,
        optax.adam(optax.cosine_decay_schedule(options.learning_rate, num_steps)),
        gradients=gradients,
        sync=sync,
        mesh=mesh,
        embeddings=embeddings,
    )


def tables(num_rows: dict[str, int], options: Options, num_steps: int) -> js.embedding.Embeddings:
    """A table per categorical column; `dest` also has where an aircraft flew earlier that day."""
    return js.embeddings(
        {
            name: js.Table(
                rows,
                options.dim,
                shard=options.shard,
                pooling="sum",
                features=("dest", "earlier") if name == "dest" else None,
                init=jax.nn.initializers.normal(0.1),
            )
            for name, rows in num_rows.items()
        },
        axis_name="shard",
        optimizer=js.rowwise_adagrad(optax.cosine_decay_schedule(options.table_rate, num_steps)),
        inputs=lambda batch: batch["ids"],
    )


def train(
    split: Split,
    mesh: jax.sharding.Mesh,
    options: Options,
    on_step: Callable[[int, int, Curve], None] = lambda *_: None,
) -> tuple[Curve, js.train.InputPipelineReport]:
    """Train and score.

    Args:
      split: flights with scaled columns.
      mesh: axes "replica" and "shard".
      options: of the run.
      on_step: called after each step with its number, the number of steps, and what was measured.
    """
    per_epoch = len(split.train.late) // options.batch_size
    num_steps = min(options.steps or per_epoch * options.epochs, per_epoch * options.epochs)
    model = DLRM(len(DENSE), len(FEATURES), options.dim, rngs=nnx.Rngs(options.seed))
    graphdef, params = nnx.split(model)
    embeddings = tables(split.num_rows, options, num_steps).over(mesh)
    step = make_step(graphdef, embeddings, mesh, options, num_steps)
    pipeline = js.TrainPipeline(
        step,
        step.init(params, seed=options.seed),
        itertools.islice(batches(split.train, options), num_steps),
        depth=0 if options.mode == "plain" else 2,
        mode="exact" if options.mode == "plain" else options.mode,
    )
    scores = scorer(graphdef, embeddings, mesh)
    due = set(np.linspace(0, num_steps, options.scores + 1).astype(int)[1:].tolist())
    curve = Curve([], [], [], [])
    for number, result in enumerate(pipeline, 1):
        curve.losses.append(float(np.mean(result.metrics["loss"])))
        if number in due:
            curve.steps.append(number)
            curve.validation.append(scores(pipeline.state.params, split.validation))
            curve.test.append(scores(pipeline.state.params, split.test))
        on_step(number, num_steps, curve)
    return curve, pipeline.report()


def batches(flights: Flights, options: Options) -> Iterator[Batch]:
    """Every flight once per epoch, in a new order; the last, short batch is left out."""
    rng = np.random.default_rng(options.seed)
    size = options.batch_size
    for _ in range(options.epochs):
        order = rng.permutation(len(flights.late))
        for start in range(0, len(order) - size + 1, size):
            yield as_batch(flights.rows(order[start : start + size]))


def as_batch(flights: Flights) -> Batch:
    """What the loss and the tables read."""
    return {"dense": flights.dense, "ids": flights.ids, "late": flights.late}


def scorer(
    graphdef: nnx.GraphDef[DLRM], embeddings: js.embedding.Embeddings, mesh: jax.sharding.Mesh
) -> Callable[[js.embedding.WithTables, Flights], float]:
    """Area under the ROC curve of the consensus of all replicas, on one device."""

    @jax.jit
    def logits(params: js.embedding.WithTables, batch: Batch) -> jax.Array:
        embedded = embeddings.reference(params.tables, batch["ids"])
        return nnx.merge(graphdef, params.dense)(batch["dense"], embedded)

    def score(params: js.embedding.WithTables, flights: Flights) -> float:
        one = jax.device_put(js.consensus(params, mesh=mesh), mesh.devices.flat[0])
        parts = range(0, len(flights.late), SCORED_AT_ONCE)
        found = [logits(one, as_batch(flights.rows(slice(i, i + SCORED_AT_ONCE)))) for i in parts]
        return float(roc_auc_score(flights.late, np.concatenate(found)))

    return score
