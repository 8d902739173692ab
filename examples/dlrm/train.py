"""Train a DLRM on flights, its tables shared by eight devices, and compare it with boosted trees.

    python examples/dlrm/train.py
    python examples/dlrm/train.py --replicas 2 --algorithm local_sgd --mode patched --tries 0

The devices are forced CPU devices where there is nothing else. Writes curves.png and result.json.
"""

import dataclasses
import json
import time
from pathlib import Path
from typing import Annotated

import figure
import flights
import jax
import trees
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from training import Algorithm, Mode, Options, Shard, train
from tyro.conf import arg

import jaxslowmo as js

DEVICES = 8
CONSOLE = Console()


def main(
    mode: Annotated[Mode, arg(help="What of the next batch is exchanged ahead.")] = "exact",
    shard: Annotated[Shard, arg(help="How tables are split.")] = "row",
    replicas: Annotated[int, arg(help="Each has 8 / replicas shards.")] = 1,
    algorithm: Annotated[Algorithm, arg(help="Between replicas.")] = "all_reduce",
    epochs: int = 1,
    batch_size: int = 512,
    dim: Annotated[int, arg(help="Of the vectors.")] = 16,
    learning_rate: Annotated[float, arg(help="Of Adam, for the dense part.")] = 2e-3,
    table_rate: Annotated[float, arg(help="Of row-wise Adagrad.")] = 0.05,
    scores: Annotated[int, arg(help="How often AUC is measured.")] = 8,
    steps: Annotated[int, arg(help="At most so many; 0: all.")] = 0,
    tries: Annotated[int, arg(help="Settings of boosted trees; 0: no trees.")] = 10,
    seed: int = 0,
    out: Path = Path("runs/dlrm"),
) -> None:
    """Train a DLRM on flights and compare its AUC with that of boosted trees."""
    if replicas < 1 or DEVICES % replicas:
        raise SystemExit(f"--replicas must divide {DEVICES}, got {replicas}.")
    jax.config.update("jax_num_cpu_devices", DEVICES)  # counts where there is only a CPU
    mesh = js.make_mesh({"replica": replicas, "shard": DEVICES // replicas})
    options = Options(
        mode=mode,
        shard=shard,
        algorithm=algorithm,
        epochs=epochs,
        batch_size=batch_size,
        dim=dim,
        learning_rate=learning_rate,
        table_rate=table_rate,
        seed=seed,
        steps=steps,
        scores=scores,
    )
    split = flights.split()
    begin = time.perf_counter()
    with _progress() as progress:
        task = progress.add_task("DLRM", told="")

        def on_step(number: int, total: int, curve: figure.Curve) -> None:
            auc = f", AUC {curve.validation[-1]:.3f}" if curve.validation else ""
            told = f"loss {curve.losses[-1]:.3f}{auc}"
            progress.update(task, completed=number, total=total, told=told)

        curve, report = train(flights.scaled(split), mesh, options, on_step)
    seconds = time.perf_counter() - begin
    boosted = _boosted(split, tries, seed) if tries else None
    out.mkdir(parents=True, exist_ok=True)
    title = f"{mode}, tables by {shard}, {replicas} x {DEVICES // replicas} devices, {algorithm}"
    lines = (boosted.validation, boosted.test) if boosted else None
    figure.draw(out / "curves.png", curve, lines, title)
    result = {
        "options": {**dataclasses.asdict(options), "replicas": replicas},
        "seconds": round(seconds, 1),
        **curve._asdict(),
        "trees": boosted and boosted._asdict(),
    }
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(report)
    print("AUC             October  November and December")
    print(f"DLRM            {curve.validation[-1]:7.4f}  {curve.test[-1]:.4f}  ({seconds:.0f} s)")
    if boosted:
        print(f"boosted trees   {boosted.validation:7.4f}  {boosted.test:.4f}  {boosted.settings}")
    print(f"Wrote {out / 'curves.png'} and {out / 'result.json'}.")


def _boosted(split: flights.Split, tries: int, seed: int) -> trees.Trees:
    with _progress() as progress:
        task = progress.add_task("trees", total=tries, told="")
        best = None
        for best in trees.boosted(split, tries=tries, seed=seed):
            progress.update(task, advance=1, told=f"AUC {best.validation:.3f}")
    assert best is not None
    return best


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(
        *columns, TimeElapsedColumn(), TextColumn("{task.fields[told]}"), console=CONSOLE
    )


if __name__ == "__main__":
    tyro.cli(main)
