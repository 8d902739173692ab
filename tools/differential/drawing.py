"""Random scenarios as plain options, the same ones for a seed in every process; jax is not used."""

import random
from typing import Any

Options = dict[str, Any]

KEEP_COPIES = ("schedule_free", "cocob", "madgrad")
OPTIMIZERS = (
    *("sgd", "momentum", "adamw", "injected", "partition", "masked", "prodigy"),
    *KEEP_COPIES,
    *("polyak", "plateau"),  # read `value`
    *("MultiSteps", "apply_if_finite"),
)
SYNC = (
    *("local_sgd", "local_sgd scheduled", "local_sgd 16 bits", "only_finite", "slowmo"),
    *("slowmo whole", "slowmo inexact", "slowmo over sgp", "sgp", "sgp late", "diloco"),
)
GRADIENTS = ("mean", "mean active", "buckets", "int8", "top_k", "rows")
KEEP_STATE = ("int8", "top_k")
WRONG = {
    "mode": "sometimes",
    "accumulate": 0,
    "model_state": "mean",
    "host_batch": "all",
    "policy": "bfloat16",
    "axis_name": "other",
    "sync": "all",
    "gradients": 3,
    "mesh": None,
}
"""An argument of `js.make_train_step` that it refuses, by name."""


def _chance(random_: random.Random, share: float) -> bool:
    return random_.random() < share


def _parts(random_: random.Random, levels: str) -> Options:
    """Which algorithm, gradient transform and optimizer; nearly always something is exchanged."""
    sync = random_.choice((None, *SYNC, *SYNC))
    inside = "device" if levels == "two levels" else None
    gradients = random_.choice(GRADIENTS)
    axes = ("replica", inside) if inside else "replica"
    if sync and _chance(random_, 0.75):
        gradients, axes = (gradients if inside else None), inside
    if axes == "device" and gradients in KEEP_STATE:  # refused
        gradients = "mean"
    return {
        "sync": sync,
        "gradients": gradients,
        "axes": axes,
        "clip": random_.choice((None, None, "gradients", "optimizer")),
        "optimizer": random_.choice(OPTIMIZERS),
    }


def loop(seed: int) -> Options:
    """A loop of one's own."""
    random_ = random.Random(f"loop {seed}")
    mesh = random_.choice(("one level", "one level", "two levels"))
    options = _parts(random_, mesh)
    return {
        **options,
        "mesh": mesh,
        "execution": "shard_map" if mesh == "two levels" else random_.choice(("shard_map", "vmap")),
        "mode": random_.choice(("traced", "host")) if options["sync"] else "traced",
        "scale": _chance(random_, 0.2),
        "around": random_.choice((None, None, None, "skip_unused", "accumulate")),
        "weight": _chance(random_, 0.25),
        "pause": _chance(random_, 0.2),
        "dtypes": random_.choice(("float32", "mixed")),
        "updates": 6,
    }


def step(seed: int, kind: str = "step") -> Options:
    """A training step; of kind "tables" one with tables, of kind "opaque" one with one chain."""
    random_ = random.Random(f"{kind} {seed}")
    has_tables, is_opaque = kind == "tables", kind == "opaque"
    mesh = random_.choice(("one level", "one level", "two levels", "virtual"))
    if has_tables:
        mesh = random_.choice(("shards", "one shard"))
    options = _parts(random_, mesh)
    scale = _chance(random_, 0.25)
    options |= {
        "mesh": mesh,
        "mode": "traced" if is_opaque else random_.choice(("traced", "host")),
        "scale": scale,
        "policy": "float16" if scale else random_.choice((None, None, None, "bfloat16")),
        "accumulate": random_.choice((1, 1, 1, 2)),
        "windows": random_.choice((None, None, None, "step", "apply")),
        "weight": _chance(random_, 0.25),
        "model_state": random_.choice((None, None, "sync_mean", "broadcast", "local")),
        "dtypes": random_.choice(("float32", "float32", "mixed")),
        "updates": 6,
    }
    if has_tables:
        options |= {
            "model_state": None,
            "clip": "optimizer" if _chance(random_, 0.1) else None,
            "optimizer": random_.choice(("sgd", "momentum", "adamw", "schedule_free", "polyak")),
            "gradients": options["gradients"] and random_.choice(("mean", "mean active", "int8")),
            "table": random_.choice(("row", "column", "table")),
            "rows": random_.choice(("adagrad", "sgd")),
            "ahead": random_.choice((None, None, "exact", "stale", "patched")),
            "dtypes": "float32",
        }
        if options["ahead"]:
            options["windows"] = None
    return options


def restore(seed: int) -> Options:
    """A step that is saved after some updates, and resumed on as many or other replicas."""
    random_ = random.Random(f"restore {seed}")
    kind = "tables" if _chance(random_, 0.15) else "step"
    options = step(seed + 1000, kind)
    if options["mesh"] == "virtual":
        options["mesh"] = "one level"
    fewer = options["mesh"] == "one level" and _chance(random_, 0.4)
    options |= {"windows": None, "ahead": None, "replicas": 2 if fewer else None, "saved_at": 3}
    return options | ({"weight": False} if fewer else {})


def misuse(seed: int) -> Options:
    """A step of which one argument is wrong."""
    random_ = random.Random(f"misuse {seed}")
    options = step(seed + 2000, random_.choice(("step", "step", "tables")))
    return options | {"wrong": random_.choice(sorted(WRONG))}


def drawn(count: int) -> dict[str, Options]:
    """About `count` scenarios by name: `step 3` is of seed 3, whatever the count."""
    kinds = {
        "loop": (loop, 0.3),
        "step": (step, 0.4),
        "tables": (lambda seed: step(seed, "tables"), 0.1),
        "opaque": (lambda seed: step(seed, "opaque"), 0.1),
        "restore": (restore, 0.1),
        "misuse": (misuse, 0.3),  # at construction, which costs nothing
    }
    return {
        f"{kind} {seed}": draw(seed)
        for kind, (draw, share) in kinds.items()
        for seed in range(max(1, round(share * count)))
    }


def said(options: Options) -> str:
    """In one line, without what is as it is by default."""
    plain = ("None", "False", "1", "reverse", "before", "float32")
    shown = {k: str(v) for k, v in options.items() if k not in ("updates", "saved_at")}
    return ", ".join(f"{k}={v}" for k, v in shown.items() if v not in plain)
