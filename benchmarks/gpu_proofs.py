"""What every algorithm compiles to on one host of 8 H100s and on four, as a table.

    python benchmarks/gpu_proofs.py                 # prints it
    python benchmarks/gpu_proofs.py --write benchmarks/results/gpu_programs.md

Compiles only (XLA's CUDA plugin from PyPI, no GPU), so it tells structure, not speed. The
algorithms stand in `tests/support/steps_of_algorithms.py`, the places in
`tests/support/gpu_steps.py` and the formulas in `tests/support/bytes_of_steps.py`;
`tests/gpu_aot/test_proofs.py` holds all of it and keeps the documented table up to date.
"""

import os

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1")

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support.gpu_steps import TABLE

if __name__ == "__main__":
    TABLE.write(__doc__)
