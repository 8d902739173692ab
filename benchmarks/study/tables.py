"""The tables of docs/study.md, from the recorded rows."""

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from cells import CODECS, FEEDBACK, SHARES, SPARSE_LOCO, TEXT_CODECS
from rows import (
    ALL_REDUCE,
    DEMO,
    DES_LOC,
    DES_LOC_BOTH,
    DILOCO,
    DILOCO_NORMS,
    DILOCO_RDA,
    INNER_STATES,
    LOCAL_ADAM,
    LOCAL_SGD,
    NOLOCO,
    PARAMETERS,
    PERIODS,
    REPLICAS,
    RESULTS,
    SGP,
    SLOWMO,
    SLOWMO_48,
    SLOWMO_SGP,
    SLOWMO_SPARTA,
    SPARTA,
    SPARTA_48,
    STEPS,
    Cell,
    Row,
    by_cell,
)
from statistics_of import gap_closed, interval

OPTIMIZERS = {"sgd": "SGD", "adamw": "AdamW"}
LABELS = {
    ALL_REDUCE: "`all_reduce`",
    SGP: "`sgp`",
    LOCAL_SGD: "`local_sgd`",
    SLOWMO: "`slowmo`",
    SLOWMO_48: "`slowmo` every 48, averages every 12",
    SLOWMO_SGP: "`slowmo` over `sgp`",
    DILOCO: "`diloco`",
}
TASKS = {"classifier": "digits", "language": "text"}
COUNTS = REPLICAS["classifier"]
RARE = (LOCAL_SGD, SLOWMO, DILOCO)
# Scaling laws for DiLoCo (arXiv 2503.09799), table 4, 35M parameters, a period of 30; 1 stands for
# data parallelism.
LAWS = {1: 3.485, 4: 3.554, 8: 3.621}


class Study:
    """The recorded rows, found by what names them."""

    def __init__(self) -> None:
        self.rows = by_cell()

    def row(
        self,
        part: str,
        optimizer: str,
        replicas: int,
        algorithm: str,
        period: int = 1,
        steps: int | None = None,
    ) -> Row:
        cell = Cell(part, optimizer, replicas, algorithm, period, steps or STEPS[part])
        return self.rows[cell]

    def losses(self, *cell: object, **options: int) -> list[float]:
        return self.row(*cell, **options)["test"]  # pyright: ignore[reportArgumentType]


def table(head: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """Return a table, whose first columns are texts, and the others numbers."""
    lines = [head, ["---"] * texts + ["---:"] * (len(head) - texts), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def loss(values: Sequence[float]) -> str:
    mean, half = interval(values)
    return f"{mean:.3f} ± {half:.3f}"


def share(closed: tuple[float, float, float]) -> str:
    return "{:.0f} % ({:.0f} to {:.0f})".format(*(100 * x for x in closed))


def replicas_head(part: str) -> list[str]:
    return [f"{count} replicas" for count in REPLICAS[part]]


def classifier_losses(study: Study, optimizer: str) -> str:
    """Return the losses of the classifier with one optimizer: a row per algorithm and period."""
    rare = (*RARE, SLOWMO_SGP)
    shown = [(ALL_REDUCE, 1), (SGP, 1), *((name, p) for p in PERIODS for name in rare)]
    lines = []
    for name, period in [*shown, (SLOWMO_48, 12)]:
        cells = [study.losses("classifier", optimizer, n, name, period) for n in COUNTS]
        lines.append([LABELS[name], every(period), *map(loss, cells)])
    return table(["", "every", *replicas_head("classifier")], lines)


def every(period: int) -> str:
    return "update" if period == 1 else str(period)


def gaps(study: Study) -> str:
    """Return the share of the gap to the all-reduce that slow momentum and diloco close."""
    lines = []
    for optimizer, period in itertools.product(OPTIMIZERS, PERIODS):
        for name in (SLOWMO, SLOWMO_48, DILOCO) if period == 12 else (SLOWMO, DILOCO):
            shares = [share(closed(study, optimizer, n, name, period)) for n in COUNTS]
            lines.append([f"{OPTIMIZERS[optimizer]}, {LABELS[name]}", str(period), *shares])
    return table(["", "averages every", *replicas_head("classifier")], lines)


def closed(
    study: Study, optimizer: str, count: int, name: str, period: int, part: str = "classifier"
) -> tuple[float, float, float]:
    """Return the share of the gap that plain averages leave, which an algorithm closes."""
    one = (part, optimizer, count)
    worse, better = study.losses(*one, LOCAL_SGD, period), study.losses(*one, name, period)
    return gap_closed(worse, better, study.losses(*one, ALL_REDUCE))


def settings(study: Study) -> str:
    """Return the settings that tuning chose, for the algorithms of docs/choosing.md."""
    lines = []
    for optimizer, (name, period) in itertools.product(
        OPTIMIZERS, [(ALL_REDUCE, 1), *((n, p) for p in PERIODS for n in RARE)]
    ):
        rows = [study.row("classifier", optimizer, n, name, period) for n in COUNTS]
        chosen = [setting(name, row["best"]) for row in rows]
        lines.append([f"{OPTIMIZERS[optimizer]}, {LABELS[name]}", every(period), *chosen])
    return table(["", "every", *replicas_head("classifier")], lines)


def setting(algorithm: str, best: dict[str, float]) -> str:
    rate = f"{best['rate']:.2g}"
    if algorithm in (ALL_REDUCE, SGP, LOCAL_SGD):
        return rate
    return f"{rate}; {best['momentum']:g}, {best['outer_rate']:g}"


def language_losses(study: Study) -> str:
    """Return losses and settings of the language model."""
    lines = []
    for name, period in [(ALL_REDUCE, 1), *((name, 48) for name in RARE)]:
        cells = [study.row("language", "adamw", n, name, period) for n in REPLICAS["language"]]
        columns = [text for x in cells for text in (loss(x["test"]), setting(name, x["best"]))]
        lines.append([LABELS[name], every(period), *columns])
    head = [text for n in REPLICAS["language"] for text in (f"{n} replicas", "setting")]
    return table(["", "every", *head], lines)


def language_gaps(study: Study) -> str:
    lines = []
    for name in (SLOWMO, DILOCO):
        found = [closed(study, "adamw", n, name, 48, "language") for n in REPLICAS["language"]]
        lines.append([LABELS[name], *map(share, found)])
    return table(["share of the gap", *replicas_head("language")], lines)


def equal_bytes(study: Study) -> str:
    """Return what equal bytes reach: few updates with all-reduces, or all with rare exchanges."""
    lines = []
    for part, optimizer, period in [
        *(("classifier", optimizer, period) for optimizer in OPTIMIZERS for period in PERIODS),
        ("language", "adamw", 48),
    ]:
        count, few = REPLICAS[part][-1], STEPS[part] // period
        one = (part, optimizer, count)
        cells = [study.losses(*one, ALL_REDUCE, steps=few)]
        cells += [study.losses(*one, name, period) for name in RARE]
        what = f"{TASKS[part]}, {OPTIMIZERS[optimizer]}, {count} replicas, {few} exchanges"
        lines.append([what, *map(loss, cells)])
    names = ["`local_sgd`", "`slowmo`", "`diloco`"]
    return table(["", "`all_reduce` in as many updates", *names], lines)


def law(count: int) -> float:
    """Return the loss of diloco over that of data parallelism, by the joint fit of the laws."""
    size = 42_880
    return 19.226 * size**-0.0985 * count**0.0116 / (18.129 * size**-0.0953)


def penalties(study: Study) -> str:
    """Return diloco's penalty in per cent of the all-reduce's loss, beside the scaling laws'."""

    def of(part: str, optimizer: str, count: int, period: int) -> str:
        one = (part, optimizer, count)
        mean = interval(study.losses(*one, DILOCO, period))[0]
        return f"{100 * (mean / interval(study.losses(*one, ALL_REDUCE))[0] - 1):.1f} %"

    measured = [f"{100 * (LAWS[n] / LAWS[1] - 1):.1f} %" for n in (4, 8)]
    extended = ["", *(f"{100 * (law(n) - 1):.1f} %" for n in (8, 16)), ""]
    text = ["", *(of("language", "adamw", n, 48) for n in (8, 16)), ""]
    lines = [
        ["scaling laws: 35M parameters, AdamW, every 30", *measured, "", ""],
        ["their joint fit, extended to 42,880 parameters", *extended],
        ["language model: 42,880 parameters, AdamW, every 48", *text],
    ]
    for optimizer, period in itertools.product(OPTIMIZERS, PERIODS):
        found = [of("classifier", optimizer, n, period) for n in COUNTS]
        lines.append([f"digits, {OPTIMIZERS[optimizer]}, every {period}", *found])
    return table(["", *replicas_head("classifier")], lines)


def flattened(study: Study) -> str:
    """Return the all-reduce's losses on the way, by the share of the updates."""
    lines, shares = [], (0.25, 0.5, 0.75, 0.9, 1.0)
    for count in REPLICAS["language"]:
        curve = study.row("language", "adamw", count, ALL_REDUCE)["curve"]
        found = [curve[round(share * len(curve)) - 1] for share in shares]
        lines.append([f"{count} replicas", *(f"{x:.3f}" for x in found)])
    steps = STEPS["language"]
    return table(["after updates", *(f"{share * steps:,.0f}" for share in shares)], lines)


def beyond(part: str) -> str:
    """Return validation losses by slow rate, from what `beyond.py` wrote for a part."""
    found = json.loads((RESULTS / "beyond.json").read_text("utf-8"))
    lines, head = [], []
    for name, results in found.items():
        if name.startswith(part):
            slow = results["slow_rates"]
            head = ["averages", *(f"slow rate {rate}" for rate in slow)]
            losses = [x["loss"] for x in (results["averages"], *slow.values())]
            lines.append([name.removeprefix(f"{part}, "), *(f"{x:.3f}" for x in losses)])
    return table(["", *head], lines)


CODED = {
    "digits, 8 replicas": Cell("classifier", "adamw", 8, DILOCO, 48, STEPS["classifier"]),
    "digits, 32 replicas": Cell("classifier", "adamw", 32, DILOCO, 48, STEPS["classifier"]),
}
CODED_TEXT = {"text, 8 replicas": Cell("language", "adamw", 8, DILOCO, 48, STEPS["language"])}
AVERAGES = {"algorithm": LOCAL_SGD}
SPARSE = {
    f"{name}, every {period}": {"algorithm": LOCAL_SGD, "period": period, "codec": codec}
    for period in PERIODS
    for name, codec in {
        "`local_sgd`": "",
        "SparseLoCo": SPARSE_LOCO,
        "without error feedback": SPARSE_LOCO.removesuffix(FEEDBACK),
    }.items()
}
MUON = {
    "AdamW": {},
    "Muon": {"optimizer": "muon"},
    "Muon, int4 with error feedback": {"optimizer": "muon", "codec": f"int4{FEEDBACK}"},
}
SPARSE_TEXT = {"`local_sgd`": AVERAGES, "SparseLoCo": {**AVERAGES, "codec": SPARSE_LOCO}}


def few_bits(study: Study) -> str:
    """Return how far losses of exchanges in few bits are above that of float32."""
    lines, columns = [], {**CODED, **CODED_TEXT}
    for codec in TEXT_CODECS:
        cells = [replace(cell, codec=codec) for cell in columns.values()]
        sent = ", ".join(share_sent(cell) for cell in cells[:2])
        above = ["{:+.3f} ± {:.3f}".format(*above_float32(study, cell)) for cell in cells]
        lines.append([codec_label(codec).removesuffix(FEEDBACK), sent, *above])
    return table(["", "bytes", *columns], lines)


def with_codecs(codecs: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the rows of a table for `in_codecs`."""
    return {"float32": {}, **{codec_label(codec): {"codec": codec} for codec in codecs}}


def codec_label(codec: str) -> str:
    name, feedback, _ = codec.partition(FEEDBACK)
    return f"`{name}`{feedback}"


def in_codecs(study: Study, rows: dict[str, dict[str, Any]], columns: dict[str, Cell]) -> str:
    """Return losses and bytes of cells that differ from those of `columns` in what `rows` say."""
    lines = []
    for name, change in rows.items():
        cells = [replace(cell, **change) for cell in columns.values()]
        lines.append([name, *(x for c in cells for x in (coded_loss(study, c), share_sent(c)))])
    return table(["", *(text for name in columns for text in (name, "bytes"))], lines)


def above_float32(study: Study, cell: Cell) -> tuple[float, float]:
    """Return what the loss of a cell is above that without its codec, and half of its interval."""
    exact = study.rows[replace(cell, codec="")]["test"]
    return interval(np.subtract(study.rows[cell]["test"], exact).tolist())  # of the same seeds


def coded_loss(study: Study, cell: Cell) -> str:
    losses = study.rows[cell]["test"]
    if not cell.codec:
        return loss(losses)
    return "{:.3f} ({:+.3f} ± {:.3f})".format(np.mean(losses), *above_float32(study, cell))


def share_sent(cell: Cell) -> str:
    """Return the bytes that a replica sends in an exchange, over those of float32."""
    if not cell.codec:
        return "1"
    codec, replicas, size = CODECS[cell.codec], cell.replicas, PARAMETERS[cell.part]
    # An all-reduce of float32, and a mean of a dense codec, send a chunk to each replica twice.
    exact = 2 * 4 * size / replicas
    chunk = 2 * codec.num_bytes(codec.chunk_size(size, replicas))
    return f"{(codec.num_bytes(size) if codec.is_sparse else chunk) / exact:.3f}"


def inner_states(study: Study) -> str:
    """Return losses of diloco that resets or averages moments, above those that it keeps."""
    found = {cell: x for cell, x in study.rows.items() if cell.algorithm in INNER_STATES}
    lines = []
    for cell, row in found.items():
        keeps = study.rows[replace(cell, algorithm=DILOCO)]["test"]
        above = interval(np.subtract(row["test"], keeps).tolist())  # of the same seeds
        what = "digits" if cell.part == "classifier" else "text"
        name = f"{what}, {OPTIMIZERS[cell.optimizer]}, every {cell.period}"
        value = cell.algorithm.removeprefix(f"{DILOCO}_")
        lines.append([name, f'`"{value}"`', loss(row["test"]), "{:+.3f} ± {:.3f}".format(*above)])
    return table(["8 replicas", "`inner_state`", "loss", "above `keep`"], sorted(lines))


OTHERS = {  # how each is called, and what it is compared with
    LOCAL_ADAM: ('`local_sgd`, `inner_state="average"`', LOCAL_SGD),
    DES_LOC: ("`des_loc`", LOCAL_SGD),
    DES_LOC_BOTH: ("`des_loc`, mu and nu every third", LOCAL_SGD),
    NOLOCO: ("`noloco`", DILOCO),
    DILOCO_RDA: ('`diloco`, `"rda"`', DILOCO),
    DILOCO_NORMS: ("`diloco`, `norm_weighted(damping=1)`", DILOCO),
    SPARTA: ("`sparta`", LOCAL_SGD),
    SPARTA_48: ("`sparta`, `share` 1/48", LOCAL_SGD),
    SLOWMO_SPARTA: ("`slowmo` over `sparta`", SLOWMO),
    DEMO: ("`demo`, then signs", ALL_REDUCE),
}
COLUMNS = {
    "digits, 8": ("classifier", 8),
    "digits, 32": ("classifier", 32),
    "text": ("language", 8),
}
# Bytes that a replica puts into an all-gather of `js.demo`, by `js.comm_report`.
DEMO_BYTES = {"classifier": 636, "language": 8640}


def others(study: Study) -> str:
    """Return losses of other papers' algorithms, how far each is above what it's compared with."""
    shown = [(ALL_REDUCE, 1, "adamw")]
    for period in (48, 12):
        names = (LOCAL_SGD, DILOCO, LOCAL_ADAM, DES_LOC, DES_LOC_BOTH, NOLOCO)
        shown += [(name, period, "adamw") for name in names]
        shown.append((DES_LOC, period, "adamw_eps"))
        if period == 48:
            names = (SLOWMO, DILOCO_RDA, DILOCO_NORMS, SLOWMO_SPARTA)
            shown += [(name, period, "adamw") for name in names]
            shown += [(SPARTA, 1, "adamw"), (SPARTA_48, 1, "adamw"), (DEMO, 1, "sign")]
    lines = []
    for name, period, optimizer in shown:
        called = OTHERS[name][0] if name in OTHERS else LABELS[name]
        line = [called + ", eps 1e-4" * (optimizer == "adamw_eps"), every(period)]
        for part, replicas in COLUMNS.values():
            cell = Cell(part, optimizer, replicas, name, period, STEPS[part])
            sent = f"{share_of_all_reduce(cell):.2%}" if cell in study.rows else ""
            line += [other_loss(study, cell), sent]
        lines.append(line)
    return table(["", "every", *(text for name in COLUMNS for text in (name, "bytes"))], lines)


DIVERGED = 10  # a loss above it; a uniform guess has 2.3 on digits and 5.5 on text
PROMISES = {
    DES_LOC: "the loss of averages of parameters and moments (Local Adam), for half of the bytes",
    NOLOCO: "up to 4 % nearer to the all-reduce's perplexity than `diloco`; no exchange of all",
    SPARTA: "more than 1,000 times fewer bytes without major degradation (shares of 0.05 to 0.5 %)",
    SLOWMO_SPARTA: "DiLoCo with outer steps 100 times rarer, at a perplexity 14 % lower",
    DEMO: "AdamW's loss for up to 85 times fewer bytes",
    DILOCO_RDA: "no quality lost with more replicas, at the same outer rate",
    DILOCO_NORMS: "no spikes of the loss where replicas diverge or their data is uneven",
}


def promises(study: Study) -> str:
    """Return what papers promise, and how far losses were above what they are compared with."""
    lines = []
    for name, promise in PROMISES.items():  # as far as their texts, or others', could be read
        called, reference = OTHERS[name]
        period = 1 if name in (SPARTA, DEMO) else 48
        cells = [
            Cell(part, "sign" if name == DEMO else "adamw", replicas, name, period, STEPS[part])
            for part, replicas in COLUMNS.values()
        ]
        above = [above_reference(study, cell) for cell in cells]
        sent = dict.fromkeys(f"{share_of_all_reduce(cell):.2g}" for cell in cells)
        lines.append([called, promise, LABELS[reference], *above, ", ".join(sent)])
    head = ["", "the paper's promise", "beside", *COLUMNS, "bytes"]
    return table(head, lines, texts=3)


def faulty() -> str:
    """Return losses by merge of outer steps, with a replica at fault, as `faulty.py` wrote them."""
    found = json.loads((RESULTS / "faulty.json").read_text("utf-8"))
    faults = list(next(iter(found.values())))
    lines = [[f"`{name}`", *(loss(by[fault]) for fault in faults)] for name, by in found.items()]
    return table(["fault of one of 8 replicas", *faults], lines)


def other_loss(study: Study, cell: Cell) -> str:
    """Return a cell's loss, and what it is above that of what it is compared with."""
    if cell not in study.rows:
        return ""
    losses = study.rows[cell]["test"]
    if cell.algorithm not in OTHERS:
        return loss(losses)
    middle = np.median(losses) if max(losses) > DIVERGED else np.mean(losses)
    return f"{middle:.3f} ({above_reference(study, cell)})"


def above_reference(study: Study, cell: Cell) -> str:
    """Return what a cell's loss is above what it is compared with, and how sure that is."""
    reference = OTHERS[cell.algorithm][1]
    period = 1 if reference == ALL_REDUCE else cell.period if cell.period > 1 else 48
    known = study.losses(cell.part, "adamw", cell.replicas, reference, period)
    losses = study.rows[cell]["test"]
    above = np.subtract(losses, known).tolist()  # of the same seeds
    if count := sum(x > DIVERGED for x in losses):
        return f"{np.median(above):+.3f} in the median, {count} of {len(losses)} diverged"
    return "{:+.3f} ± {:.3f}".format(*interval(above))


def share_of_all_reduce(cell: Cell) -> float:
    """Return what a replica sends, over what an all-reduce in every update does, in a ring."""
    name, replicas = cell.algorithm, cell.replicas
    if name == DEMO:  # it passes on the parts of all others; an all-reduce, 2 (R - 1) / R of all
        return DEMO_BYTES[cell.part] * replicas / (2 * 4 * PARAMETERS[cell.part])
    if name == NOLOCO:
        return replicas / (2 * (replicas - 1)) / cell.period
    if name in (SPARTA, SPARTA_48):
        return SHARES[name]
    if name == SLOWMO_SPARTA:
        return SHARES[name] * (1 - 1 / cell.period) + 1 / cell.period
    moments = {LOCAL_ADAM: 2.0, DES_LOC: 1 / 3 + 1 / 6, DES_LOC_BOTH: 2 / 3}
    return (1 + moments.get(name, 0)) / cell.period


def edges(study: Study) -> tuple[int, int]:
    """Return how many cells chose the smallest or largest of a grid's values, and of how many."""
    found, tuned = 0, [row for row in study.rows.values() if "tuning" in row]
    for row in tuned:
        tried = row["tuning"]["settings"]
        found += any(
            len(set(values)) > 1 and row["best"][name] in (min(values), max(values))
            for name, values in tried.items()
        )
    return found, len(tuned)


def all_tables(study: Study) -> dict[str, str]:
    """Return the tables of the pages by the names of their markers."""
    return {
        "sgd": classifier_losses(study, "sgd"),
        "adamw": classifier_losses(study, "adamw"),
        "gaps": gaps(study),
        "settings": settings(study),
        "beyond": beyond("classifier"),
        "beyond-text": beyond("language"),
        "language": language_losses(study),
        "language-gaps": language_gaps(study),
        "equal-bytes": equal_bytes(study),
        "penalties": penalties(study),
        "flattened": flattened(study),
        "few-bits": few_bits(study),
        "few-bits-digits": in_codecs(study, with_codecs(list(CODECS)), CODED),
        "few-bits-text": in_codecs(study, with_codecs(TEXT_CODECS) | SPARSE_TEXT, CODED_TEXT),
        "few-bits-sparse": in_codecs(study, SPARSE, CODED),
        "few-bits-muon": in_codecs(study, MUON, dict(list(CODED.items())[:1])),
        "inner-states": inner_states(study),
        "others": others(study),
        "faulty": faulty(),
        "promises": promises(study),
        "edges": "{} of {} rows".format(*edges(study)),
    }
