"""A compiler that does little: most time of a test goes into programs that run a few times.

XLA's own passes, and so the compiled program that tests read, stay as they are.
"""

from importlib.metadata import version

# One part per program for LLVM: splitting a small one costs more than it gains (an eighth of the
# time). And emitters that compile in half of the time; jax 0.12 has no others.
QUICK_CODE = "--xla_cpu_parallel_codegen_split_count=1"
if version("jaxlib") < "0.11":
    QUICK_CODE += " --xla_cpu_use_fusion_emitters=false"
# For a process that never loads libtpu, which reads the same flags and knows fewer.
QUICK_COMPILER = f"--xla_backend_optimization_level=0 {QUICK_CODE}"
