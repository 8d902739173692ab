"""The states of a step with tables."""

from typing import Any, cast

import optax

from ...._typing import PyTree
from ....embedding import WithTables
from ....transform import chain, no_exchange, note_followed
from ._replica_step import StepParts, of_known_layout
from ._shards import Tables, on_shards


def table_chain(parts: StepParts, tables: Tables) -> optax.GradientTransformationExtraArgs:
    """States of gradient transform, optimizers and exchange, as one optax transform.

    Its `init` takes `WithTables`, under the replica axis; its `update` is the step's.
    """
    embeddings = tables.embeddings
    optimizers = chain(*parts.first_two())
    sync = no_exchange() if parts.sync is None else of_known_layout(parts.sync)

    def both(dense: PyTree, stored: PyTree) -> tuple[PyTree, PyTree]:
        states = optimizers.init(dense)
        note_followed(states)
        return states, embeddings.init_optimizer(stored)

    def init(params: WithTables) -> tuple[PyTree, PyTree, PyTree]:
        # The axis is bound for gradient transforms that average over it, too.
        (gradients_state, optimizer_state), row_state = on_shards(
            tables.nested,
            both,
            *params,
            kinds=("whole", embeddings.specs),
            out=("whole", embeddings.optimizer_specs),
        )
        return gradients_state, WithTables(optimizer_state, row_state), sync.init(params)

    def update(*_: Any, **__: Any) -> Any:
        raise ValueError(
            "`step.tx` of a step with `embeddings` makes states alone: gradients of rows are no "
            "tree like the parameters. Call the step."
        )

    return optax.GradientTransformationExtraArgs(cast("optax.TransformInitFn", init), update)
