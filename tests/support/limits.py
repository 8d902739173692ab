"""What a supported version of jax cannot do; tests leave it out under that version alone."""

from importlib.metadata import version

# jaxlib 0.11's compiler for CPUs ends the process where a program over several devices takes an
# array without elements beside another one (docs/start.md).
TAKES_EMPTY_ARRAYS = not version("jaxlib").startswith("0.11.")
