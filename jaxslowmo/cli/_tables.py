"""Summaries as tables."""

import statistics
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from ._units import format_bytes, format_count, format_loss


def run_table(summary: dict[str, Any]) -> Table:
    """One run: a line per number."""
    table = Table(show_header=False, title=f"{summary['algorithm']}: {summary['status']}")
    speed = summary["tokens_per_second"]
    verb = "would be sent" if summary["bytes_are_hypothetical"] else "sent"
    for name, value in (
        ("steps", str(summary["steps"])),
        ("parameters", format_count(summary["parameters"])),
        ("training loss, nats/byte", format_loss(summary["loss"])),
        ("validation loss of the consensus, nats/byte", format_loss(summary["validation_loss"])),
        (f"bytes {verb} per replica", format_bytes(summary["bytes_sent"])),
        *(
            (f"  in a step of kind {kind}", format_bytes(count))
            for kind, count in summary["bytes_per_step_by_kind"].items()
        ),
        *(
            [
                ("scale of the loss", f"{summary['loss_scale']:g}"),
                ("updates skipped, all replicas", str(summary["skipped_updates"])),
            ]
            if "loss_scale" in summary
            else []
        ),
        ("tokens/s, all replicas", "-" if speed is None else format_count(speed)),
        ("seconds", f"{summary['seconds']:.1f}"),
    ):
        table.add_row(name, value)
    return table


def compare_rows(summaries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per algorithm, in the order of their first appearance.

    Returns:
      `algorithm`, `seeds`, `validation_loss` (mean over the seeds that finished, None without
      any), `spread` (largest minus smallest, None below two), `bytes_sent` (mean), `ratio` (to
      the first row's bytes), `tokens_per_second` (mean), `diverged` (number of seeds).
    """
    by_algorithm: dict[str, list[dict[str, Any]]] = {}
    for summary in summaries:
        by_algorithm.setdefault(summary["algorithm"], []).append(summary)
    rows: list[dict[str, Any]] = []
    for algorithm, runs in by_algorithm.items():
        done = [run for run in runs if run["status"] == "finished"]
        losses = [run["validation_loss"] for run in done]
        speeds = [run["tokens_per_second"] for run in done if run["tokens_per_second"]]
        sent = statistics.fmean(run["bytes_sent"] for run in done) if done else None
        first = rows[0]["bytes_sent"] if rows else sent
        rows.append(
            {
                "algorithm": algorithm,
                "seeds": [run["seed"] for run in done],
                "validation_loss": statistics.fmean(losses) if losses else None,
                "spread": max(losses) - min(losses) if len(losses) > 1 else None,
                "bytes_sent": sent,
                "ratio": sent / first if sent is not None and first else None,
                "tokens_per_second": statistics.fmean(speeds) if speeds else None,
                "diverged": sum(run["status"] == "diverged" for run in runs),
            }
        )
    return rows


def compare_table(rows: Sequence[dict[str, Any]], *, would: bool) -> Table:
    """The rows of `compare_rows` side by side."""
    first = rows[0]["algorithm"] if rows else ""
    table = Table(
        caption="validation loss: nats per byte, consensus model; "
        f"bytes {'that a replica would send' if would else 'sent per replica'}",
        caption_justify="left",
    )
    table.add_column("algorithm", overflow="fold")  # settings make long names
    for name in ("validation", "spread", "bytes", f"of {first}", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        diverged = f" ({row['diverged']} diverged)" if row["diverged"] else ""
        table.add_row(
            row["algorithm"],
            format_loss(row["validation_loss"]) + diverged,
            format_loss(row["spread"]),
            "-" if row["bytes_sent"] is None else format_bytes(row["bytes_sent"]),
            "-" if row["ratio"] is None else f"{100 * row['ratio']:.3g} %",
            "-" if row["tokens_per_second"] is None else format_count(row["tokens_per_second"]),
        )
    return table
