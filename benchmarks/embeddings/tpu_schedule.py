"""What runs beside the exchange of embeddings on TPU, read off compiled programs.

    python benchmarks/embeddings/tpu_schedule.py --out benchmarks/results/embedding_tpu_schedule.md

Compiles only (libtpu from PyPI, no TPU), so it tells structure, not speed: instructions stand in
the order in which they run, and what stands between the start and the end of an all-to-all runs
beside it. The step stands in `tests/support/embedding_steps.py`;
`tests/tpu_aot/test_embeddings.py` holds a smaller one to it.
"""

import os

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")

import argparse
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import get_args

import jax

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from support.embedding_steps import Ahead, Workload
from support.tpu_embeddings import ASYNC, all_to_alls
from support.tpu_schedule import Transfer
from support.tpu_slices import tpu_mesh

WORKLOAD = Workload(tables=4)
# Name, topology, slices, chips, options of the compiler
PLACES = [
    ("v5e:2x4", "v5e:2x4", 1, 8, {}),
    ("v5e:2x4", "v5e:2x4", 1, 8, ASYNC),
    ("v6e:4x4", "v6e:4x4", 1, 16, ASYNC),
    ("v5p:2x2x2", "v5p:2x2x2", 1, 8, ASYNC),
    ("2 x v5e:2x4", "v5e:2x4", 2, 16, {}),
]
UNREADABLE = " | ".join(["compiled, but jaxlib cannot print it", "", ""])


def rows() -> Iterator[str]:
    for name, topology, num_slices, chips, options in PLACES:
        mesh = tpu_mesh(topology, {"shard": chips}, num_slices=num_slices)
        for ahead in get_args(Ahead):
            try:
                found = all_to_alls(mesh, WORKLOAD, ahead, options)
            except jax.errors.JaxRuntimeError as error:
                # Updates of asynchronous all-to-alls on some slices, which jaxlib cannot print.
                if "async-update" not in str(error):
                    raise
                yield f"| {name} | {'yes' if options else 'no'} | {ahead} | {UNREADABLE} |"
                continue
            ids = next(one for one in found if one.shape.startswith("s32"))
            # Vectors are looked up before there are gradients of any.
            vectors, gradients = (one for one in found if one is not ids)
            cells = [name, "yes" if options else "no", ahead]
            cells += [_beside(one) for one in (ids, vectors, gradients)]
            yield "| " + " | ".join(cells) + " |"


def _beside(one: Transfer) -> str:
    return "blocks" if one.is_blocking else f"{one.products} + {one.others}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    ((option, value),) = ASYNC.items()
    lines = [
        f"jax {jax.__version__}, libtpu {version('libtpu')}; "
        "`python benchmarks/embeddings/tpu_schedule.py`",
        "",
        f"A step with {WORKLOAD.tables} tables of {WORKLOAD.rows:,} rows of {WORKLOAD.dim} floats, "
        f"sharded by row, {WORKLOAD.batch} examples per chip, and {len(WORKLOAD.widths)} dense "
        f"layers of {WORKLOAD.widths[0]}: {WORKLOAD.num_products} matrix products. Cells: products "
        "+ other computations between the start and the end of an all-to-all. `ids`: those of the "
        "next batch are exchanged in the step; `vectors`: they are looked up and exchanged, too. "
        f"Option: `{option}={value}`.",
        "",
        "| slice | option | ahead | ids of the next batch | vectors | row gradients |",
        "|---|---|---|---|---|---|",
        *rows(),
    ]
    print("\n".join(lines))
    if out:
        out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
