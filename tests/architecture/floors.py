"""Which package may import which: as functions from a repository root to violations."""

import sys
from pathlib import Path

from architecture.imports import PACKAGE, imports_of
from architecture.shape import API

TOP_LEVEL = ""  # `jaxslowmo/__init__.py`

# A package imports only from lower floors; packages on one floor do not import each other.
FLOORS = {
    "_support": -1,
    "_version": -1,
    "tree": 0,
    "topology": 0,
    "mesh": 1,
    "language": 1,
    "data": 2,
    "models": 2,
    "tracing": 2,
    "collectives": 2,
    "transform": 3,
    "algorithms": 4,
    "gradients": 4,
    "pipeline": 5,
    "embedding": 5,
    "reports": 6,
    "train": 7,
    "checkpoint": 8,
    API: 9,
    "cli": 10,
    "__main__": 11,
}
# These may need the `train` extra. All others import, at module level, only what the core installs.
BEYOND_CORE = {"language", "data", "models", "checkpoint", "cli", "__main__"}
CORE_DEPENDENCIES = {"jax", "jaxlib", "numpy", "optax"}
# `torch_compat` stands beside the package; only its examples may need more than these.
TORCH_FLOORS = {
    "autograd_threads": 0,
    "batches": 0,
    "errors": 0,
    "master": 0,
    "samples": 0,
    "settings": 0,
    "meeting": 1,
    "messages": 1,
    "reader": 1,
    "runtime": 2,
    "worker": 2,
    "data": 3,
    "slowmo": 3,
    "synchronizer": 3,
    "on_jax": 4,
    "xla_worker": 4,
    "manager": 5,
    TOP_LEVEL: 6,
    "examples": 7,
}
TORCH_DEPENDENCIES = {"numpy", "torch", "torch_xla"}
# The one part on jax's engine may need these, and the package; nothing loads it before it is used.
TORCH_ON_JAX = "on_jax"
TORCH_ON_JAX_DEPENDENCIES = {"jax", "numpy", "torch", "torchax"}
# `import jaxslowmo.topology` runs these and must work without jax.
JAX_FREE = {TOP_LEVEL, "topology"}


def _unit(parts: tuple[str, ...], known: set[str]) -> str:
    """The unit of the package that `jaxslowmo.<parts>` belongs to."""
    if parts and parts[0] in known:
        return parts[0]
    return TOP_LEVEL


def climbs(importer: str, imported: str) -> bool:
    """Whether this import goes up, or sideways, instead of down."""
    if importer == imported:
        return False
    if imported == TOP_LEVEL:
        return importer not in {"cli", "__main__"}
    if importer == TOP_LEVEL:
        return imported not in {API, "topology", "_version"}
    if imported == API:
        return True
    return FLOORS[imported] >= FLOORS[importer]


def floor_violations(root: Path) -> list[str]:
    """Imports that climb, packages without a floor, and core modules that need an extra."""
    source = root / PACKAGE
    units = {p.stem for p in source.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    units.discard("__init__")
    found = [f"{PACKAGE}/{u} has no floor: add it to FLOORS" for u in sorted(units - set(FLOORS))]
    known = units | set(FLOORS)
    for path in sorted(source.rglob("*.py")):
        inside = path.relative_to(source).with_suffix("").parts
        importer = _unit(inside, known)
        if importer != TOP_LEVEL and importer not in FLOORS:
            continue
        for line, target, eager in imports_of(path, root):
            where = f"{path.relative_to(root)}:{line}"
            who = importer or "the top level"
            name, *rest = target.split(".")
            if name == PACKAGE:
                imported = _unit(tuple(rest), known)
                if imported in units - set(FLOORS):
                    continue
                if climbs(importer, imported):
                    found.append(f"{where} {who} must not import {target}")
                if importer == TOP_LEVEL and imported == API and eager:
                    found.append(f"{where} {who} must not load {API} before a name is used")
                if importer == "topology" and imported != "topology":
                    found.append(f"{where} topology stands alone and must not import {target}")
            elif name in sys.stdlib_module_names:
                continue
            elif importer in JAX_FREE and name != "numpy":
                found.append(f"{where} {who} is plain Python and NumPy, not {name}")
            elif importer not in BEYOND_CORE and eager and name not in CORE_DEPENDENCIES:
                found.append(f"{where} {name} is not a core dependency: import it where it is used")
    return found


def torch_compat_violations(root: Path) -> list[str]:
    """Imports in `torch_compat/` that climb, or reach beyond torch and `jaxslowmo.topology`.

    `on_jax` alone may reach further, and only what is not eager may reach it.
    """
    source = root / "torch_compat"
    found = []
    for path in sorted(source.rglob("*.py")):
        importer = _torch_unit(path.relative_to(source).with_suffix("").parts)
        where = path.relative_to(root)
        if importer not in TORCH_FLOORS:
            found.append(f"{where} torch_compat/{importer} has no floor: add it to TORCH_FLOORS")
            continue
        for line, target, eager in imports_of(path, root):
            name, *rest = target.split(".")
            on_jax = importer == TORCH_ON_JAX
            known = TORCH_ON_JAX_DEPENDENCIES if on_jax else TORCH_DEPENDENCIES
            foreign = name not in sys.stdlib_module_names | known
            if name == "torch_compat":
                imported = _torch_unit(tuple(rest))
                lower = TORCH_FLOORS[imported] < TORCH_FLOORS[importer]
                if importer != imported and not lower:
                    found.append(f"{where}:{line} {importer} must not import {target}")
                elif imported == TORCH_ON_JAX != importer and eager:
                    found.append(f"{where}:{line} loads {imported} before it is used")
            elif name == PACKAGE:
                if not on_jax and not f"{target}.".startswith(f"{PACKAGE}.topology."):
                    allowed = f"{PACKAGE}.topology"
                    found.append(f"{where}:{line} torch_compat may import {allowed}, not {target}")
            elif foreign and eager and importer != "examples":
                found.append(f"{where}:{line} torch_compat{'.on_jax' * on_jax} has no {name}")
    return found


def _torch_unit(parts: tuple[str, ...]) -> str:
    """The unit that `torch_compat.<parts>` belongs to."""
    if not parts or parts[0] == "__init__":
        return TOP_LEVEL
    folder_or_file = parts[0]
    # A name of `torch_compat/__init__.py`, such as `torch_compat.TPUManager`.
    return folder_or_file if len(parts) > 1 or not folder_or_file[0].isupper() else TOP_LEVEL
