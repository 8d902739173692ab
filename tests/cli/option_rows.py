"""Right, wrong and empty values of every option of every command."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

INVALID = "Invalid value for"  # of typer, which says what it takes
HUGE = "1" + 20 * "0"


@dataclasses.dataclass(frozen=True)
class Row:
    """How an option is called.

    Attributes:
      good: a value; None of an option without one.
      becomes: what the command makes of it; a predicate where it is no plain value.
      bad: wrong values, and words of the errors.
      empty: words of the error of an empty value.
      beside: what else the call needs.
    """

    good: str | None
    becomes: Any
    bad: Mapping[str, str]
    empty: str
    beside: tuple[str, ...] = ()


def count(good: int = 7, least: int = 1, most: str = HUGE, beside: str = "") -> Row:
    bad = {
        **dict.fromkeys(("x", "1.5", "nan", "inf", "1e20"), INVALID),
        str(least - 1): f"must be >= {least}, got {least - 1}",
        most: "must be < ",
    }
    return Row(str(good), good, bad, INVALID, tuple(beside.split()))


def number(good: float = 0.5, beside: str = "", below: str = "finite number, got inf") -> Row:
    bad = {"inf": below, "-1": "must be >= 0, got -1.0", "nan": "must be >= 0, got nan"}
    return Row(str(good), good, bad | {"x": INVALID}, INVALID, tuple(beside.split()))


def choice(good: str, beside: str = "") -> Row:
    bad = dict.fromkeys(("x", "nan", HUGE), "must be one of")
    return Row(good, good, bad, "must be one of", tuple(beside.split()))


def flag(beside: str = "") -> Row:
    bad = dict.fromkeys(("1", "true", "x"), "does not take a value")
    return Row(None, True, bad, "does not take a value", tuple(beside.split()))


def path(option: str) -> Row:
    return Row("there", Path("there"), {"": f"{option} must be a path"}, "must be a path")


def mixing(beside: str = "") -> Row:
    bad = dict.fromkeys(
        ("x", "uniform:1", "self_weighted", "self_weighted:1"), "must be uniform, or"
    )
    bad |= dict.fromkeys(("self_weighted:nan", "self_weighted:0"), "a share between 0 and 1")
    good = "self_weighted:0.7"
    return Row(good, good, bad, "--mixing must not be empty", tuple(beside.split()))


def listed(good: str, becomes: tuple[Any, ...], bad: Mapping[str, str]) -> Row:
    return Row(good, becomes, bad, "must list one or more different")


GOSSIP, SLOWMO, DILOCO = "--algorithm sgp", "--algorithm slowmo", "--algorithm diloco"
ALL = "--algorithms all_reduce,local_sgd,sgp,slowmo,diloco"
SEEDS = {"x": "must be integers", "-1": ">= 0, got -1", str(2**32): "must be < 4294967296, got"}
NODES = {"0": "must be >= 1", "x": "must be integers", "1.5": "must be integers", HUGE: "at most"}


STAGES = "--mesh stage=2 --batch 4"


def trained(algorithm: Callable[[str], str]) -> dict[str, Row]:
    """Options that `train` and `compare` have; those of an algorithm beside `algorithm(which)`."""
    gossip, slowmo, diloco = algorithm("sgp"), algorithm("slowmo"), algorithm("diloco")
    return {
        "--out": path("--out"),
        "--preset": choice("tiny"),
        "--dtype": choice("bfloat16"),
        "--loss-scale": number(2.0, "--dtype float16"),
        "--loss-scale-interval": count(beside="--dtype float16"),
        "--steps": count(),
        "--batch": count(),
        "--accumulate": count(4, most=str(2**31), beside="--batch 8"),
        "--data": Row("text", "text", {}, "--data must not be empty"),
        "--overwrite": flag("--out there"),
        "--eval-every": count(),
        "--eval-batches": count(most=str(2**20)),
        "--log-every": count(),
        "--prefetch": count(least=0, most=str(2**20)),
        "--tensorboard": flag(),
        "--replicas": count(),
        "--devices-per-replica": count(2, most=str(2**31), beside="--batch 8"),
        "--execution": choice("virtual"),
        "--mode": choice("host"),
        "--bucket-mib": number(1.0, algorithm("all_reduce"), "must be < 1048576, got inf"),
        "--sync-every": count(beside=slowmo),
        "--slow-every": count(beside=diloco),
        "--graph": choice("ring", gossip),
        "--peers-per-step": count(beside=gossip),
        "--overlap": count(2, least=0, most="1024", beside=gossip),
        "--mixing": mixing(gossip),
        "--slow-momentum": number(0.3, slowmo, "must be < 1, got inf"),
        "--slow-learning-rate": number(beside=slowmo),
        "--nesterov": flag(slowmo),
        "--shard-state": flag(diloco),
        "--exact-average": flag(slowmo),
        "--codec": choice("float16", gossip),
        "--fragments": count(2, beside=slowmo),
        "--delay": count(3, least=0, beside=slowmo),
        "--merge": number(beside=slowmo),
        "--outer-learning-rate": number(beside=diloco),
        "--outer-momentum": number(0.3, diloco, "must be < 1, got inf"),
        "--optimizer": choice("sgd"),
        "--learning-rate": number(),
        "--warmup": count(3, least=0),
        "--rate-schedule": choice("constant"),
        "--schedule-steps": count(),
        "--weight-decay": number(),
        "--clip": number(),
        "--validate": choice("after"),
        "--tied": flag(),
        "--mesh": Row(
            "replica=2, fsdp=2",
            "replica=2, fsdp=2",
            {
                "x": "sizes of axes",
                "stage=0": "sizes of axes",
                "stage=x": "sizes of axes",
                "node=2": "has the axes replica, device, stage, fsdp, tensor, got node",
                "fsdp=2,fsdp=2": "each axis once, got fsdp again",
                "replica=2,fsdp=8": "--batch must be a multiple of --accumulate times the sizes",
            },
            "must be sizes of axes",
            ("--batch", "4"),
        ),
        "--schedule": choice("gpipe", STAGES),
        "--microbatches": count(2, beside=STAGES),
        "--chunks": count(2, beside=STAGES),
        "--executor": choice("host", STAGES),
    }


TOGETHER = "--coordinator h:1 --num-processes 2 --process-id 1 --out there"
ONLY_TRAIN = {
    "--algorithm": choice("local_sgd"),
    "--seed": count(least=0, most=str(2**32)),
    "--patience": count(least=0),
    "--statistics": flag(),
    "--statistics-rate": count(beside="--statistics"),
    "--checkpoint-every": count(least=0),
    "--keep": count(),
    "--resume": flag("--out there"),
    "--fallback": flag(),
    "--max-failed-saves": count(),
    "--export": flag(),
    "--check-parameters": flag(),
    "--on-nan": choice("rollback", "--checkpoint-every 5"),
    "--max-rollbacks": count(beside="--on-nan rollback --checkpoint-every 5"),
    "--coordinator": Row(
        "[::1]:80", "[::1]:80",
        {"h": "must be HOST:PORT", "h:0": "must be 1 to 65535", "::1:80": "in brackets"},
        "--coordinator must not be empty", tuple(TOGETHER.split()[2:]),
    ),
    "--coordinator-bind": Row(
        "0.0.0.0", "0.0.0.0", {"0.0.0.0:80": "a host's name or address", "a b": "a host's name"},
        "--coordinator-bind must not be empty",
    ),
    "--num-processes": count(3, beside=TOGETHER),
    "--process-id": count(0, least=0, beside=TOGETHER),
    "--cluster": choice("none"),
    "--heartbeat-timeout": count(least=2),
    "--startup-timeout": count(),
    "--stall-timeout": count(least=0),
    "--process-logs": flag(),
    "--restarts": count(least=0),
}  # fmt: skip

TRAIN = trained(lambda which: f"--algorithm {which}")
TABLE: dict[str, dict[str, Row]] = {
    "train": TRAIN | ONLY_TRAIN,
    "compare": trained(lambda which: ALL) | {
        "--algorithms": listed(
            "sgp,sgp+overlap=1", ("sgp", "sgp+overlap=1"),
            {
                "x": "must be of all_reduce", "sgp,sgp": "different values",
                "sgp+speed=1": "name+SETTING=VALUE", "sgp+overlap=x": "must be of type int",
                "sgp+overlap=-1": "--overlap must be >= 0", "slowmo+graph=ring": "not with slowmo;",
            },
        ),
        "--seeds": listed("3,4", (3, 4), SEEDS),
    },
    "sample": {
        "--step": count(least=0),
        "--prompt": Row(" a b", " a b", {}, "--prompt must not be empty"),
        "--tokens": count(most=str(2**20)),
        "--temperature": number(),
        "--top-k": count(least=0, most="257"),
        "--seed": count(least=0, most=str(2**32)),
    },
    "launch": {
        "--processes": Row(
            "2", 2, {"x": INVALID, "0": "1 to 1024, got 0", HUGE: "1 to 1024"}, INVALID
        ),
        "--restarts": Row("3", 3, {"x": INVALID, "-1": INVALID, "1e20": INVALID}, INVALID),
        "--heartbeat-timeout": Row("9", 9, {"x": INVALID, "1": INVALID}, INVALID),
    },
    "inspect graph": {
        "--nodes": Row("8", 8, NODES | {"x": INVALID, "1.5": INVALID, HUGE: "must be <"}, INVALID),
        "--peers-per-step": count(),
        "--dedupe": flag(),
        "--rows": count(),
        "--group-size": count(),
        "--num-rounds": count(),
        "--seed": count(least=0, most=str(2**63)),
        "--phone-book": Row("a.json", Path("a.json"), {"": "--phone-book"}, "--phone-book"),
        "--mixing": mixing(),
        "--tolerance": Row(
            "0.1", 0.1,
            {"0": "strictly between 0 and 1", "1": "strictly", "nan": "finite", "x": INVALID},
            INVALID,
        ),
        "--model-bytes": count(least=0),
        "--parameters": count(least=0),
        "--matrices": flag(),
        "--json": flag(),
    },
    "inspect schedule": {
        "--stages": count(),
        "--microbatches": count(),
        "--chunks": count(),
        "--forward": number(),
        "--backward-input": number(),
        "--backward-weight": number(),
        "--send": number(),
        "--lockstep": flag(),
        "--forward-only": flag(),
        "--memory": count(),
        "--warm-up": choice("all"),
        "--most-stash": count(),
        "--table": Row("a.csv", Path("a.csv"), {"": "--table"}, "--table"),
        "--whole": flag(),
        "--orders": flag(),
        "--json": flag(),
        "--out": path("--out"),
    },
    "inspect graphs": {
        "--nodes": listed("4,8", (4, 8), NODES),
        "--graphs": listed("ring,ring:2", ("ring", "ring:2"), {
            "x": "must be of npeer", "ring:0": "a number >= 1", "ring:x": "a number >= 1",
        }),
        "--picture-nodes": listed("4", (4,), NODES),
        "--mixing": mixing(),
        "--tolerance": Row("0.1", 0.1, {"0": "strictly", "inf": "finite", "x": INVALID}, INVALID),
        "--page": path("--page"),
        "--out": path("--out"),
    },
    "inspect config": {
        **{
            name: row for name, row in TRAIN.items()
            if name in ("--preset", "--dtype", "--tied", "--batch", "--accumulate", "--mesh",
                        "--replicas", "--devices-per-replica", "--schedule", "--microbatches",
                        "--chunks", "--executor", "--mode", "--graph", "--codec",
                        "--shard-state")
        },
        "--algorithm": ONLY_TRAIN["--algorithm"],
    },
    "tune buckets": {
        "--limits": listed("1KiB,2kB", (1024, 2000), {
            "x": "takes sizes", "-1": "takes sizes", "nan": "takes sizes", "1,1": "different sizes",
        }),
        "--first": Row("2KiB", 2048, {"x": "takes sizes", "inf": "takes sizes"}, "takes sizes"),
        "--order": choice("ready"),
        "--rounds": count(),
        "--steps": count(),
        **{
            name: row for name, row in TRAIN.items()
            if name in ("--out", "--preset", "--dtype", "--batch", "--accumulate", "--replicas",
                        "--devices-per-replica", "--optimizer")
        },
        "--seed": ONLY_TRAIN["--seed"],
    },
    "tune outer": {
        "--momenta": listed("0.2,0.5", (0.2, 0.5), {"x": "must be numbers", "1": "must be < 1"}),
        "--rates": listed("0.7,1", (0.7, 1.0), {"x": "must be numbers", "-1": "must be >= 0"}),
        "--factors": listed("0.5,1", (0.5, 1.0), {"x": "must be numbers", "0": "must be > 0"}),
        "--periods": listed("4,8", (4, 8), {"x": "must be integers", "0": "must be >= 1"}),
        "--seeds": listed("1,2", (1, 2), {"x": "must be integers", "1,1": "different"}),
        **{
            name: row for name, row in TRAIN.items()
            if name in ("--out", "--preset", "--tied", "--batch", "--data", "--eval-every",
                        "--eval-batches", "--sync-every", "--nesterov", "--fragments", "--delay",
                        "--merge", "--optimizer", "--learning-rate", "--warmup",
                        "--rate-schedule", "--weight-decay", "--clip")
        },
        **{
            name: dataclasses.replace(TRAIN[name], beside=("--algorithm=slowmo_sgp",))
            for name in ("--graph", "--peers-per-step", "--overlap", "--mixing")
        },
        "--steps": count(beside="--periods=4"),
        "--replicas": count(),
        "--algorithm": choice("diloco"),
    },
}  # fmt: skip
