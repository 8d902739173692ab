"""What runs during the exchanges of a training step with sharded tables, on TPU slices."""

from jax.sharding import Mesh

from support.embedding_steps import Ahead, Workload, lowered_with_tables
from support.tpu_schedule import Transfer, read_all_to_alls

# Inside a slice an all-to-all blocks without it.
ASYNC = {"xla_tpu_enable_async_all_to_all": "true"}


def all_to_alls(
    mesh: Mesh, workload: Workload, ahead: Ahead, options: dict[str, str]
) -> list[Transfer]:
    """Return the all-to-alls of a step, and how much runs at the same time as each.

    Args:
      mesh: mesh of TPU chips, with the one axis "shard".
      workload: sizes.
      ahead: what the step exchanges for the next batch: only its ids, or its vectors too.
      options: options of the compiler.
    """
    program = lowered_with_tables(mesh, workload, ahead)
    text = program.compile(compiler_options=options or None).as_text() or ""
    transfers, products = read_all_to_alls(text, mesh.size)
    assert products == workload.num_products, products
    return transfers
