"""What every algorithm compiles to on one TPU slice and on four, as a table.

    python benchmarks/tpu_proofs.py                 # prints it
    python benchmarks/tpu_proofs.py --write benchmarks/results/tpu_programs.md

Compiles only (libtpu from PyPI, no TPU), so it tells structure, not speed. The algorithms stand in
`tests/support/steps_of_algorithms.py`, the places in `tests/support/tpu_steps.py` and the formulas
in `tests/support/bytes_of_steps.py`; `tests/tpu_aot/test_proofs.py` holds all of it and keeps the
documented table up to date.
"""

import os

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support.tpu_steps import TABLE

if __name__ == "__main__":
    TABLE.write(__doc__)
