"""Right and wrong values of every option of every command."""

import dataclasses
from pathlib import Path
from typing import Any

HUGE = "1" + 20 * "0"


@dataclasses.dataclass(frozen=True)
class Row:
    """How an option is called.

    Attributes:
      good: a value; None of an option without one.
      becomes: what the command makes of it.
      bad: wrong values; an empty one always is.
      beside: what else the call needs.
      edges: the outermost right values.
    """

    good: str | None
    becomes: Any
    bad: tuple[str, ...] = ()
    beside: str = ""
    edges: tuple[str, ...] = ()


def count(beside: str = "", *, good: int = 7, least: int = 1, below: int | None = None) -> Row:
    """An integer; without `below` the bound is that of a counter of 32 bits."""
    bad = ("x", "1.5", str(least - 1), str(below or HUGE))
    edges = (str(least), *([str(below - 1)] if below else []))
    return Row(str(good), good, bad, beside, edges)


def number(beside: str = "", *, good: float = 0.5, bad: str = "inf", least: str = "0") -> Row:
    return Row(str(good), good, (bad, "-1", "nan", "x"), beside, (least,))


def choice(good: str, beside: str = "") -> Row:
    return Row(good, good, ("x", "nan"), beside)


def flag(beside: str = "") -> Row:
    return Row(None, True, ("1", "true"), beside)


def path() -> Row:
    return Row("there", Path("there"))


def mixing(beside: str = "") -> Row:
    bad = ("x", "uniform:1", "self_weighted", "self_weighted:1", "self_weighted:0")
    return Row("self_weighted:0.7", "self_weighted:0.7", bad, beside, ("uniform",))


GOSSIP, SLOWMO, DILOCO = "--algorithm sgp", "--algorithm slowmo", "--algorithm diloco"
ISLAND = "--islands run --island a"
FLOAT16, TOLD = "--dtype float16", "--on-nan rollback --checkpoint-every 5"
STAGES = "--mesh stage=2 --batch 4"
TOGETHER = "--coordinator h:1 --num-processes 2 --process-id 1 --out there"
SEED = count(least=0, below=2**32)
NODES = ("0", "x", "1.5", HUGE, "1025")
TOLERANCE = Row("0.1", 0.1, ("0", "1", "nan", "x"))

TRAIN = {
    "--config": Row("options.yaml", Path("options.yaml"), ("/no/such/file",)),
    "--out": path(),
    "--preset": choice("tiny"),
    "--dtype": choice("bfloat16"),
    "--attention": choice("cudnn", "--dtype bfloat16"),
    "--tied": flag(),
    "--loss-scale": number(FLOAT16, good=2.0, bad="0.5", least="1"),
    "--loss-scale-interval": count(FLOAT16),
    "--steps": count(),
    "--batch": count(below=2**20),
    "--accumulate": count("--batch 8", good=4),
    "--data": Row("text", "text"),
    "--overwrite": flag("--out there"),
    "--eval-every": count(),
    "--eval-batches": count(below=2**20),
    "--log-every": count(),
    "--prefetch": count(least=0, below=2**20),
    "--tensorboard": flag(),
    "--replicas": count(),
    "--devices-per-replica": count("--batch 8", good=2),
    "--execution": choice("virtual"),
    "--mode": choice("host"),
    "--bucket-mib": number("--algorithm all_reduce", good=1.0),
    "--sync-every": count(SLOWMO),
    "--slow-every": count(DILOCO),
    "--graph": choice("ring", GOSSIP),
    "--peers-per-step": count(GOSSIP),
    "--overlap": count(GOSSIP, good=2, least=0, below=1024),
    "--mixing": mixing(GOSSIP),
    "--slow-momentum": number(SLOWMO, good=0.3, bad="1"),
    "--slow-learning-rate": number(SLOWMO),
    "--nesterov": flag(SLOWMO),
    "--shard-state": flag(DILOCO),
    "--exact-average": flag(SLOWMO),
    "--codec": choice("float16", GOSSIP),
    "--fragments": count(SLOWMO, good=2),
    "--delay": count(SLOWMO, good=3, least=0),
    "--merge": number(SLOWMO),
    "--inner-state": choice("reset", SLOWMO),
    "--outer-learning-rate": number(DILOCO),
    "--outer-momentum": number(DILOCO, good=0.3, bad="1"),
    "--optimizer": choice("sgd"),
    "--learning-rate": number(),
    "--warmup": count(good=3, least=0),
    "--rate-schedule": choice("constant"),
    "--schedule-steps": count(),
    "--weight-decay": number(),
    "--clip": number(),
    "--mesh": Row(
        "'replica=2, fsdp=2'", "replica=2, fsdp=2",
        ("x", "stage=0", "stage=x", "node=2", "fsdp=2,fsdp=2", "replica=2,fsdp=8"), "--batch 4",
    ),
    "--schedule": choice("gpipe", STAGES),
    "--microbatches": count(STAGES, good=2),
    "--chunks": count(STAGES, good=2),
    "--executor": choice("host", STAGES),
    "--algorithm": choice("local_sgd"),
    "--islands": Row("s3://bucket/run", "s3://bucket/run", (), "--island a"),
    "--island": Row(
        "paris-1.b", "paris-1.b", ("-a", "a/b", "a" * 65), "--islands run", ("a" * 64,),
    ),
    "--quorum": count(ISLAND),
    "--deadline-seconds": number(ISLAND),
    "--late": Row(
        "carry:0.5", "carry:0.5", ("x", "drop:1", "carry:0", "carry:0.0", "carry:1.1", "carry:"),
        ISLAND, ("drop", "carry", "carry:.25", "carry:1"),
    ),
    "--seed": SEED,
    "--patience": count(least=0),
    "--statistics": flag(),
    "--statistics-rate": count("--statistics"),
    "--checkpoint-every": count(least=0),
    "--keep": count(),
    "--resume": flag("--out there"),
    "--fallback": flag(),
    "--max-failed-saves": count(),
    "--export": flag(),
    "--check-parameters": flag(),
    "--on-nan": choice("rollback", "--checkpoint-every 5"),
    "--max-rollbacks": count(TOLD),
    "--coordinator": Row(
        "[::1]:80", "[::1]:80", ("h", "h:0", "h:65536", "h:x", "::1:80", "[h]:80"), TOGETHER[18:],
        ("h:1", "h:65535"),
    ),
    "--coordinator-bind": Row("0.0.0.0", "0.0.0.0", ("0.0.0.0:80", "'a b'")),
    "--num-processes": Row("3", 3, ("x", "0", "1"), TOGETHER, ("2",)),
    "--process-id": count(TOGETHER, good=0, least=0),
    "--cluster": choice("none"),
    "--heartbeat-timeout": count(least=2),
    "--startup-timeout": count(),
    "--stall-timeout": count(least=0),
    "--process-logs": flag(),
    "--restarts": count(least=0),
}  # fmt: skip
# Options of each command that `train` has, too.
SHARED = {
    "compare": " ".join([*TRAIN][: [*TRAIN].index("--algorithm")]),
    "inspect config": " ".join(option for option in TRAIN if option != "--out"),
    "tune buckets": """--config --out --preset --dtype --attention --batch --accumulate --replicas
        --optimizer --seed --devices-per-replica""",
    "tune outer": """--config --out --preset --tied --batch --data --eval-every --eval-batches
        --sync-every --nesterov --fragments --delay --merge --inner-state --optimizer
        --learning-rate --warmup --rate-schedule --weight-decay --clip --graph --peers-per-step
        --overlap --mixing""",
}
TABLE: dict[str, dict[str, Row]] = {
    "train": TRAIN,
    "compare": {
        "--algorithms": Row(
            "sgp,sgp+overlap=1", ("sgp", "sgp+overlap=1"),
            ("x", "sgp,sgp", "sgp+overlap", "sgp+speed=1", "sgp+algorithm=diloco", "sgp+overlap=x",
             "sgp+overlap=-1", "slowmo+nesterov=1", "slowmo+graph=ring"),
        ),
        "--seeds": Row("3,4", (3, 4), ("x", "-1", str(2**32), ","), "", ("0", str(2**32 - 1))),
    },
    "sample": {
        "--step": count(least=0),
        "--prompt": Row("' a b'", " a b"),
        "--tokens": count(below=2**20),
        "--temperature": number(),
        "--top-k": count(least=0, below=257),
        "--seed": SEED,
    },
    "islands status": {},
    "launch": {
        "--processes": Row("2", 2, ("x", "0", "1025"), "", ("1", "1024")),
        "--restarts": Row("3", 3, ("x", "-1"), "", ("0",)),
        "--heartbeat-timeout": Row("9", 9, ("x", "1"), "", ("2",)),
    },
    "inspect graph": {
        "--nodes": Row("8", 8, NODES, "", ("1",)),
        "--peers-per-step": count(),
        "--dedupe": flag(),
        "--rows": count(),
        "--group-size": count(),
        "--num-rounds": count(),
        "--seed": count(least=0, below=2**63),
        "--phone-book": Row("a.json", Path("a.json")),
        "--mixing": mixing(),
        "--tolerance": TOLERANCE,
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
        "--table": Row("a.csv", Path("a.csv")),
        "--orders": flag(),
        "--json": flag(),
        "--out": path(),
    },
    "inspect graphs": {
        "--nodes": Row("4,8", (4, 8), (*NODES, "4,4", ","), "", ("1", "1024")),
        "--graphs": Row("ring,ring:2", ("ring", "ring:2"), ("x", "ring:0", "ring:x", "ring,ring")),
        "--picture-nodes": Row("4", (4,), (*NODES, "4,4")),
        "--mixing": mixing(),
        "--tolerance": TOLERANCE,
        "--page": path(),
        "--out": path(),
    },
    "inspect config": {},
    "tune buckets": {
        "--limits": Row("1KiB,2kB", (1024, 2000), ("x", "-1", "nan", "1,1", ","), "",
                        ("'1MiB, 500kB,4096, 0.5gib,7 B'",)),
        "--first": Row("2KiB", 2048, ("x", "inf")),
        "--order": choice("ready"),
        "--rounds": count(),
        "--steps": count(),
    },
    "tune outer": {
        "--momenta": Row("0.2,0.5", (0.2, 0.5), ("x", "1", "0.5,0.5"), "", ("0",)),
        "--rates": Row("0.7,1", (0.7, 1.0), ("x", "-1"), "", ("0",)),
        "--factors": Row("0.5,1", (0.5, 1.0), ("x", "0")),
        "--periods": Row("4,8", (4, 8), ("x", "0", "49"), "--preset tiny", ("1", "48")),
        "--seeds": Row("1,2", (1, 2), ("x", "1,1")),
        "--steps": count("--periods=4", least=4),
        "--replicas": count(least=2),
        "--algorithm": choice("diloco"),
    },
}  # fmt: skip
