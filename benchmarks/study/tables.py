"""The tables of docs/study.md, from the recorded rows."""

from collections.abc import Iterable, Sequence

from rows import (
    ALL_REDUCE,
    DILOCO,
    LOCAL_SGD,
    PERIODS,
    REPLICAS,
    SGP,
    SLOWMO,
    SLOWMO_48,
    SLOWMO_SGP,
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
    SLOWMO: "`slowmo` over it",
    SLOWMO_48: "`slowmo` over it, every 48",
    SLOWMO_SGP: "`slowmo` over `sgp`",
    DILOCO: "`diloco`",
}
# Scaling laws for DiLoCo (arXiv 2503.09799), table 4, 35M parameters, a period of 30.
LAWS = {1: 3.485, 2: 3.508, 4: 3.554, 8: 3.621}


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


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:" for _ in head[1:]]], *rows]
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
    lines = []
    for name, period in [
        (ALL_REDUCE, 1),
        (SGP, 1),
        *((name, p) for p in PERIODS for name in (LOCAL_SGD, SLOWMO, DILOCO, SLOWMO_SGP)),
        (SLOWMO_48, 12),
    ]:
        cells = [
            study.losses("classifier", optimizer, n, name, period) for n in REPLICAS["classifier"]
        ]
        label = LABELS[name].replace(" over it, every 48", ", every 48, over `local_sgd`")
        label = label.replace(" over it", "")
        lines.append([label, "update" if period == 1 else str(period), *map(loss, cells)])
    return table(["", "every", *replicas_head("classifier")], lines)


def gaps(study: Study) -> str:
    """Return the share of the gap to the all-reduce that slow momentum and diloco close."""
    lines = []
    for optimizer, period in [(o, p) for o in OPTIMIZERS for p in PERIODS]:
        for name in (SLOWMO, DILOCO):
            shares = []
            for count in REPLICAS["classifier"]:
                one = ("classifier", optimizer, count)
                worse = study.losses(*one, LOCAL_SGD, period)
                better = study.losses(*one, name, period)
                shares.append(share(gap_closed(worse, better, study.losses(*one, ALL_REDUCE))))
            lines.append([f"{OPTIMIZERS[optimizer]}, every {period}, `{name}`", *shares])
    return table(["", *replicas_head("classifier")], lines)


def settings(study: Study) -> str:
    """Return the settings that tuning chose, for the algorithms of docs/choosing.md."""
    lines = []
    for optimizer in OPTIMIZERS:
        for name, period in [
            (ALL_REDUCE, 1),
            *((n, p) for p in PERIODS for n in (LOCAL_SGD, SLOWMO, DILOCO)),
        ]:
            found = [
                study.row("classifier", optimizer, n, name, period)["best"]
                for n in REPLICAS["classifier"]
            ]
            label = LABELS[name].replace(" over it", "")
            every = "" if period == 1 else f", every {period}"
            lines.append(
                [f"{OPTIMIZERS[optimizer]}, {label}{every}", *(setting(name, x) for x in found)]
            )
    return table(["", *replicas_head("classifier")], lines)


def setting(algorithm: str, best: dict[str, float]) -> str:
    rate = f"{best['rate']:.2g}"
    if algorithm in (ALL_REDUCE, SGP, LOCAL_SGD):
        return rate
    return f"{rate}; {best['momentum']:g}, {best['outer_rate']:g}"


def language_losses(study: Study) -> str:
    """Return losses and settings of the language model."""
    lines = []
    for name, period in [(ALL_REDUCE, 1), *((n, 48) for n in (LOCAL_SGD, SLOWMO, DILOCO))]:
        cells = [study.row("language", "adamw", n, name, period) for n in REPLICAS["language"]]
        label = LABELS[name].replace(" over it", "")
        columns = [text for x in cells for text in (loss(x["test"]), setting(name, x["best"]))]
        lines.append([label, "update" if period == 1 else str(period), *columns])
    head = [text for n in REPLICAS["language"] for text in (f"{n} replicas", "setting")]
    return table(["", "every", *head], lines)


def language_gaps(study: Study) -> str:
    lines = []
    for name in (SLOWMO, DILOCO):
        shares = []
        for count in REPLICAS["language"]:
            one = ("language", "adamw", count)
            worse, better = study.losses(*one, LOCAL_SGD, 48), study.losses(*one, name, 48)
            shares.append(share(gap_closed(worse, better, study.losses(*one, ALL_REDUCE))))
        lines.append([f"`{name}`", *shares])
    return table(["", *replicas_head("language")], lines)


def equal_bytes(study: Study) -> str:
    """Return what equal bytes reach: fewer updates with an all-reduce, or all with rare exchanges."""
    lines = []
    for part, optimizer in [("classifier", "sgd"), ("classifier", "adamw"), ("language", "adamw")]:
        for period in PERIODS if part == "classifier" else (48,):
            count = REPLICAS[part][-1]
            one, few = (part, optimizer, count), STEPS[part] // period
            lines.append(
                [
                    f"{part}, {OPTIMIZERS[optimizer]}, {count} replicas, {few} exchanges",
                    loss(study.losses(*one, ALL_REDUCE, steps=few)),
                    *(
                        loss(study.losses(*one, name, period))
                        for name in (LOCAL_SGD, SLOWMO, DILOCO)
                    ),
                ]
            )
    return table(["", "`all_reduce`, every update", "`local_sgd`", "`slowmo`", "`diloco`"], lines)


def penalties(study: Study) -> str:
    """Return diloco's penalty in per cent of the all-reduce's loss, beside the scaling laws'."""

    def of(part: str, optimizer: str, count: int, period: int) -> str:
        one = (part, optimizer, count)
        mean = interval(study.losses(*one, DILOCO, period))[0]
        return f"{100 * (mean / interval(study.losses(*one, ALL_REDUCE))[0] - 1):.1f} %"

    lines = [
        [
            "scaling laws, 35M parameters, every 30",
            *(f"{100 * (LAWS[n] / LAWS[1] - 1):.1f} %" for n in (4, 8)),
            "",
            "",
        ],
        [
            "language model, AdamW, every 48",
            "",
            *(of("language", "adamw", n, 48) for n in (8, 16)),
            "",
        ],
    ]
    for optimizer in OPTIMIZERS:
        for period in PERIODS:
            found = [of("classifier", optimizer, n, period) for n in REPLICAS["classifier"]]
            lines.append([f"classifier, {OPTIMIZERS[optimizer]}, every {period}", *found])
    return table(["", *replicas_head("classifier")], lines)


def flattened(study: Study) -> str:
    """Return the all-reduce's losses after half of the updates and after all."""
    lines = []
    for count in REPLICAS["language"]:
        one = ("language", "adamw", count, ALL_REDUCE)
        half, whole = study.losses(*one, steps=STEPS["language"] // 2), study.losses(*one)
        change = 100 * (1 - interval(whole)[0] / interval(half)[0])
        lines.append([f"{count} replicas", loss(half), loss(whole), f"{change:.1f} %"])
    steps = STEPS["language"]
    return table(["", f"{steps // 2} updates", f"{steps} updates", "lower by"], lines)


def edges(study: Study) -> tuple[int, int]:
    """Return how many cells chose the smallest or largest of a grid's values, and of how many."""
    found = 0
    for row in study.rows.values():
        tried = row["tuning"]["settings"]
        found += any(
            len(set(values)) > 1 and row["best"][name] in (min(values), max(values))
            for name, values in tried.items()
        )
    return found, len(study.rows)


def blocks(study: Study) -> dict[str, str]:
    """Return the tables by the names of their markers."""
    return {
        "sgd": classifier_losses(study, "sgd"),
        "adamw": classifier_losses(study, "adamw"),
        "gaps": gaps(study),
        "settings": settings(study),
        "language": language_losses(study),
        "language-gaps": language_gaps(study),
        "equal-bytes": equal_bytes(study),
        "penalties": penalties(study),
        "flattened": flattened(study),
        "edges": "{} of {} rows".format(*edges(study)),
    }
