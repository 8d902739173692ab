"""A step's settings, which all processes must share: compared before the first state is made.

Other settings would make processes run other programs: they wait for each other for ever, or train
on each other's garbage.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax

from ..._support.settings import described
from ..._support.types import AxisName, PyTree
from ...mesh import AnyMesh, compare_descriptions, describe
from ...tracing import traced_update

# What differs between processes in the text of equal programs: addresses, and the order of sets.
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_SET = re.compile(r"frozenset\(\{([^}]*)\}\)")


def compare_settings(
    settings: Mapping[str, Any], params: PyTree | None, *, mesh: AnyMesh, axis_name: AxisName
) -> None:
    """Raise `ValueError` on every process if some have other settings, and name these.

    An optax transform without settings of its own is known by the tree and the dtypes of its state,
    and by a hash of the program of its update, constants included.

    Args:
      settings: the arguments of `make_train_step` and of `init`, by name.
      params: stacked parameters, equal on all processes; with None the programs of transforms are
        not compared.
      mesh: the mesh of the step.
      axis_name: the replica axis.

    Communication: none with one process; else two gathers of a few KiB through the host.
    """
    if jax.process_count() == 1:
        return

    def text(value: Any) -> str | None:
        if isinstance(value, optax.GradientTransformation):
            return "a transform" if params is None else _text_of(value, params, mesh, axis_name)
        return None

    lines = [line for name, x in settings.items() for line in described(f"`{name}`", x, text)]
    compare_descriptions("make_train_step: settings", lines)


def _text_of(
    tx: optax.GradientTransformation, params: PyTree, mesh: AnyMesh, axis_name: AxisName
) -> str:
    program, state = traced_update(tx, params, mesh=mesh, axis_name=axis_name)
    hasher = hashlib.blake2b(repr(describe(state)).encode(), digest_size=8)
    if program is not None:
        text = _ADDRESS.sub("", str(program.jaxpr))
        text = _SET.sub(lambda found: repr(sorted(found[1].split(", "))), text)
        hasher.update(text.encode())
        for x in program.consts:
            hasher.update(np.asarray(x).tobytes())
    return f"a transform with update {hasher.hexdigest()}"
