"""The step times as markdown."""


def markdown(result: dict) -> str:
    machine = result["machine"]
    rates = list(next(row["rates"] for row in result["rows"] if row["rates"]))
    lines = [
        "# Step time on shaped links",
        "",
        f"`{result['command']}`: {result['hosts']} hosts, network namespaces of one machine, links "
        f"shaped in both directions; {machine['processor']}, {machine['cores']} cores for all "
        f"hosts; jax {machine['jax']}, torch {result['torch']['torch']}, gloo in both, one "
        f"arithmetic thread per process. An MLP of {result['model_bytes'] / 1e6:.2f} MB (float32), "
        f"batch {result['batch']} per host. Load averages (1 minute) before and after: "
        f"{' and '.join(map(str, result['load_averages']))}.",
        "",
        "ms: median over rounds of a step, the slowest host's; between the quarter points in "
        "brackets. / DDP and / alone: medians of ratios within a round, to torch's DDP and to the "
        "same library without communication. processor ms: of all threads of a host's process, per "
        "step. MB: sent per host and step, headers included.",
    ]
    for rate in rates:
        lines += [
            "",
            f"## {rate.replace('mbit', ' Mbit/s').replace('gbit', ' Gbit/s')}",
            "",
            "| | ms | / DDP | / alone | processor ms | MB |",
            "|---|---:|---:|---:|---:|---:|",
        ]
        for row in result["rows"]:
            name = f"{row['library']}: {row['variant']}"
            if "refused" in row:
                lines.append(f"| {name} | refused: {row['refused'].splitlines()[0]} |||||")
                continue
            at = row["rates"][rate]
            ms = at["ms"]
            lines.append(
                f"| {name} | {ms['median']:.0f} ({ms['low']:.0f} to {ms['high']:.0f}) "
                f"| {number(at['ratio_to_ddp'])} | {number(at['ratio_to_alone'])} "
                f"| {at['processor_ms']:.1f} | {at['bytes'] / 1e6:.3f} |"
            )
    return "\n".join(lines) + "\n"


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
