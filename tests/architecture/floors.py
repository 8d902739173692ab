"""Which package may import which: as functions from a repository root to violations."""

import sys
from pathlib import Path

from architecture.imports import PACKAGE, TORCH, TREES, imports_of

TOP_LEVEL = ""  # the `__init__.py` of a tree
ON_JAX = "on_jax"  # the one part of torch_compat on jax's engine

# A package imports only from lower floors; packages on one floor do not import each other.
FLOORS: dict[str, float] = {
    "_support": -1, "_version": -1, "tree": 0, "topology": 0, "mesh": 1, "language": 1,
    "data": 2, "models": 2, "tracing": 2, "collectives": 2, "transform": 3, "algorithms": 4,
    "gradients": 4, "spec": 4, "pipeline": 5, "embedding": 5, "sparse": 5, "reports": 6, "train": 7,
    "checkpoint": 8, "islands": 8, TOP_LEVEL: 9, "cli": 10, "__main__": 11,
}  # fmt: skip
TORCH_FLOORS: dict[str, float] = {
    "checks": -1, "tensors": -1, "autograd_threads": 0, "errors": 0, "master": 0, "settings": 0,
    "meeting": 1, "messages": 1, "reader": 1, "runtime": 2, "worker": 2, "slowmo": 3,
    ON_JAX: 4, "xla_worker": 4, "manager": 5, TOP_LEVEL: 6, "examples": 7,
}  # fmt: skip
# Units that may import less than lower floors: `import jaxslowmo.topology` must work without jax.
ONLY = {TOP_LEVEL: {"_version"}, "topology": set()}
LAZY = {ON_JAX}  # loaded when one of their names is used
# These may need an extra. All others import, at module level, only what the core installs.
BEYOND_CORE = {"language", "data", "models", "checkpoint", "islands", "cli", "__main__", "examples"}
CORE_DEPENDENCIES = {"jax", "jaxlib", "numpy", "optax"}
TORCH_DEPENDENCIES = {"numpy", "torch", "torch_xla"}
ON_JAX_DEPENDENCIES = {"jax", "numpy", "torch", "torchax"}


def _unit(root: Path, tree: str, parts: tuple[str, ...]) -> str:
    """The package or module of a tree that `tree.<parts>` belongs to; names are the top level's."""
    place = root.joinpath(tree, *parts[:1])
    is_unit = parts and (place.is_dir() or place.with_suffix(".py").exists() or parts[0] in FLOORS)
    return parts[0] if is_unit and parts[0] != "__init__" else TOP_LEVEL


def _inside(floors: dict[str, float], importer: str, imported: str, eager: bool) -> str:
    """What is wrong with an import inside of a tree; "" if nothing is."""
    if importer == imported:
        return ""
    strict = floors is FLOORS and importer in ONLY and (eager or importer != TOP_LEVEL)
    allowed = imported in ONLY[importer] if strict else floors.get(imported, 99) < floors[importer]
    if not allowed:
        return f"{importer or 'the top level'} must not import {imported or 'the top level'}"
    return f"loads {imported} before it is used" if imported in LAZY and eager else ""


def _outside(tree: str, importer: str, target: str, eager: bool) -> str:
    """What is wrong with an import from another tree or library; "" if nothing is."""
    name = target.partition(".")[0]
    if name in sys.stdlib_module_names:
        return ""
    if tree == TORCH and name == PACKAGE:
        allowed = importer == ON_JAX or f"{target}.".startswith(f"{PACKAGE}.topology.")
        return "" if allowed else f"{TORCH} may import {PACKAGE}.topology, not {target}"
    if tree == PACKAGE and importer in ONLY:
        return "" if name == "numpy" else f"is plain Python and NumPy, not {name}"
    known = ON_JAX_DEPENDENCIES if importer == ON_JAX else TORCH_DEPENDENCIES
    known = CORE_DEPENDENCIES if tree == PACKAGE else known
    if importer in BEYOND_CORE - (set() if tree == PACKAGE else {"data"}) or not eager:
        return ""
    return "" if name in known else f"{name} is no dependency: import it where it is used"


def floor_violations(root: Path) -> list[str]:
    """Imports that climb, units without a floor, and imports of what is not installed."""
    found = []
    for tree, floors in zip(TREES, (FLOORS, TORCH_FLOORS), strict=True):
        units = {_unit(root, tree, (p.stem,)) for p in (root / tree).iterdir() if p.stem[0] != "."}
        units = {u for u in units if not u.startswith("__py")} - {"py"}
        found += [f"{tree}/{unit} has no floor" for unit in sorted(units - floors.keys())]
        for path, (line, target, eager) in imports_of(root, tree):
            importer = _unit(root, tree, path.relative_to(root / tree).with_suffix("").parts)
            name, *rest = target.split(".")
            if importer not in floors:
                continue
            if name == tree:
                wrong = _inside(floors, importer, _unit(root, tree, tuple(rest)), eager)
            else:
                wrong = _outside(tree, importer, target, eager)
            if wrong:
                found.append(f"{path.relative_to(root)}:{line} {wrong} ({target})")
    return found
