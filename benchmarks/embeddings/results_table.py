"""The step times of sharded embeddings as markdown."""

import textwrap

import workload


def markdown(result: dict) -> str:
    lines = ["# Step time of sharded embeddings on shaped links", "", *_paragraphs(result)]
    for rate in result["rates"]:
        lines += [
            f"## {rate.replace('mbit', ' Mbit/s').replace('gbit', ' Gbit/s')}",
            "",
            "| | ms | / unpipelined | MB | sending alone, ms | least possible, ms |",
            "|---|---:|---:|---:|---:|---:|",
            *_rows(result, rate),
            "",
        ]
    for name, row in result["rows"].items():
        if "refused" in row:
            lines += [f"{name}: refused: {row['refused'].splitlines()[0]}", ""]
    return "\n".join(lines).rstrip() + "\n"


def _paragraphs(result: dict) -> list[str]:
    machine = result["machine"]
    needed = [f"{value / 1e6:.3f} MB of {name}" for name, value in result["needed_bytes"].items()]
    return [
        _text(f"""
            `{result["command"]}`: {workload.HOSTS} hosts, network namespaces of one machine, links
            shaped in both directions; {machine["processor"]}, {machine["cores"]} cores for all
            hosts; jax {machine["jax"]}, gloo, one arithmetic thread per process.
            {workload.TABLES} tables of {workload.ROWS:,} rows of {workload.DIM} float32, ids with
            Zipf's exponent {workload.EXPONENT}, batch {workload.BATCH} per host,
            {machine["capacity"]} slots per owner and table, {result["dense_parameters"]:,} dense
            parameters, whose gradients are averaged in every step. Load averages (1 minute) before
            and after: {" and ".join(map(str, result["load_averages"]))}.
            """),
        "",
        f"Needed by a host and step, without padding and headers: {', '.join(needed)}.",
        "",
        _text("""
            ms: median over rounds of a step, the slowest host's; between the quarter points in
            brackets. MB: sent per host and step, headers included. Sending alone: these bytes over
            the rate of the link. Least possible: the longer of that and of computing alone.
            """),
        "",
    ]


def _text(paragraph: str) -> str:
    return " ".join(textwrap.dedent(paragraph).split())


def _rows(result: dict, rate: str) -> list[str]:
    at = {name: row["rates"][rate] for name, row in result["rows"].items() if row["rates"]}
    compute = at["compute alone"]["ms"]["median"] if "compute alone" in at else 0.0
    lines = []
    for name, found in at.items():
        ms, sent, ratio = found["ms"], found["bytes"], found["ratio"]
        sending = 8000 * sent / _bits_per_second(rate)
        least = max(sending, compute)
        cells = [
            name,
            f"{ms['median']:.0f} ({ms['low']:.0f} to {ms['high']:.0f})",
            "" if ratio is None else f"{ratio:.2f}",
            f"{sent / 1e6:.3f}",
            *(["", ""] if name == "compute alone" else [f"{sending:.0f}", f"{least:.0f}"]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _bits_per_second(rate: str) -> float:
    """What tc writes as "200mbit"."""
    return float(rate[:-4]) * {"mbit": 1e6, "gbit": 1e9}[rate[-4:]]
