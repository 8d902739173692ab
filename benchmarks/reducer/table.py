"""The results as markdown."""

NAMES = {
    ("jax", "none"): "gradients only, no reduction",
    ("torch", "no_sync"): "gradients only, no reduction",
    ("jax", "psum"): "`lax.pmean` per leaf",
    ("torch", "per leaf"): "`all_reduce` per leaf, no DDP",
    ("torch", "default"): "DDP, default limits",
    ("torch", "view"): "DDP, `gradient_as_bucket_view`",
}


def label(library: str, variant: str) -> str:
    base, *flags = variant.split(", ")
    kind, *arguments = base.split()
    name = NAMES.get((library, base))
    if name is None and kind == "cap":
        name = f"buckets of {arguments[0]} MiB" if library == "jax" else f"DDP, {arguments[0]} MiB"
    if name is None and kind == "hook":
        name = f"hook `{arguments[0]}({', '.join(arguments[1:])})`"
    name = name or f"DDP, hook `{base}`"
    told = {"apart": ", combiner off", "alone": ", leaves from 1 MiB alone"}
    return name + "".join(told[flag] for flag in flags)


def number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def markdown(result: dict) -> str:
    machine, torch = result["machine"], result["torch"]
    lines = [
        "# Gradient reduction beside torch's DistributedDataParallel",
        "",
        f"`{result['command']}`, {result['arguments']['processes']} processes, gloo over loopback, "
        f"{machine['processor']}, {machine['cores']} cores, jax {machine['jax']}, jaxlib "
        f"{machine['jaxlib']}, torch {torch['torch']}. Load averages (1 minute) during the run: "
        f"{', '.join(map(str, result['load_averages']))}.",
        "",
        "step: median of a step that makes the gradients and reduces them; between the quarter "
        "points in brackets. reduction: less the same step without a reduction. Ratios are of "
        "steps, medians over rounds. sent: bytes per process and step on the interface. error: "
        "of one early step, relative to the exact mean.",
    ]
    for model, about in result["models"].items():
        lines += [
            "",
            f"## {model}: {about['about']}; {about['bytes'] / 1e6:,.2f} MB",
            "",
            "| | step ms | reduction ms | / DDP | / psum | sent MB | collectives | error |",
            "|---|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for row in about["rows"]:
            name = f"{row['library']}: {label(row['library'], row['variant'])}"
            if "refused" in row:
                lines.append(f"| {name} | refused: {row['refused'].splitlines()[0]} |||||||")
                continue
            step = row["step_ms"]
            count = sum(row.get("collectives", {}).values()) or len(row.get("buckets", ()))
            lines.append(
                f"| {name} | {step['median']:.1f} ({step['low']:.1f} to {step['high']:.1f}) "
                f"| {number(row['reduction_ms'], 1)} | {number(row['ratio_to_ddp'], 2)} "
                f"| {number(row['ratio_to_psum'], 2)} | {row['bytes_sent'] / 1e6:.3f} "
                f"| {count or ''} | {row['error']:.1e} |"
            )
    return "\n".join(lines) + "\n"
