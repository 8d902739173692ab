"""Everything that we want to know of a GPU, measured in ten minutes by one command.

    python benchmarks/gpu_day.py --out benchmarks/results/gpu_day.md

It needs jax for CUDA and the extras `train` and `test`. Each part is a process of its own with a
limit of time: one that fails or hangs does not end the others. The result file names the device,
and has the command, the seconds, the figures and the errors of each part; it is written after each.
`--tiny` runs all parts with tiny sizes on a CPU, which tries this file and measures nothing.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

ROOT = Path(__file__).parents[1]
PROBE_SECONDS = 120
LAST_LINES = 60
# This process never starts CUDA, and so leaves the whole memory of the GPU to the parts. They run
# one after the other. Without preallocation a part takes only what it needs, so that neither a
# process that a test starts beside itself nor another user of the GPU makes it fail. Memory that
# was allocated once is kept, and every part warms up before it measures.
MEMORY = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
PROBE = """
import json, jax
from machine import describe
device = jax.devices()[0]
if device.platform == {refused!r}:
    raise SystemExit("jax sees only CPUs")
memory = (device.memory_stats() or {{}}).get("bytes_limit", 0)
print(json.dumps(describe() | {{
    "count": len(jax.devices()), "memory": memory, "runtime": device.client.platform_version
}}))
"""


class Device(NamedTuple):
    """What the parts run on: number of devices, memory of each in bytes, and facts to print."""

    count: int
    memory: int
    facts: dict[str, str]


class NoDevice(Exception):
    """Jax has no GPU; the text says why."""


@dataclass(frozen=True)
class Part:
    """One measurement.

    Attributes:
      name: its title in the result file.
      command: what is run, in the root of the repository.
      weight: its share of the time that is left, relative to the parts after it.
      environment: variables beside those of all parts.
    """

    name: str
    command: Sequence[str]
    weight: float = 1.0
    environment: Mapping[str, str] = field(default_factory=dict)


class Result(NamedTuple):
    """How a part ended: "ok" or what went wrong, its seconds, and the last lines it printed."""

    part: Part
    outcome: str
    seconds: float
    output: str
    errors: str


def environment_on(platform: str) -> dict[str, str]:
    """Return the environment of all parts; on "cuda" they fail if a GPU does not start."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    platforms = "cpu" if platform == "cpu" else f"{platform},cpu"
    return {**MEMORY, **os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": platforms}


def probe(platform: str) -> Device:
    """Return the devices of a platform, as another process sees them; raise `NoDevice`."""
    code = PROBE.format(refused="" if platform == "cpu" else "cpu")
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT / "benchmarks",
            env=environment_on(platform),
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise NoDevice(f"jax did not start within {PROBE_SECONDS} seconds") from None
    if done.returncode:
        raise NoDevice(done.stderr.strip().splitlines()[-1])
    found = json.loads(done.stdout.splitlines()[-1])
    count, memory = found.pop("count"), found.pop("memory")
    facts = {name: str(value) for name, value in found.items()}
    if memory:
        facts["memory for jax"] = f"{memory / 1e9:.1f} GB each"
    return Device(count, memory, facts | ({} if platform == "cpu" else driver()))


def driver() -> dict[str, str]:
    """Return what NVIDIA's driver says of itself and of the devices."""
    fields = "driver_version,name,memory.total,power.limit,clocks.max.sm"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return {"driver": f"unknown: {error}"}
    return {f"driver ({fields})": "; ".join(done.stdout.strip().splitlines())}


def parts_of(device: Device, folder: Path) -> list[Part]:
    """Return the parts for GPUs, with sizes that fill them; `folder` takes what they write."""
    several = device.count > 1
    is_large = device.memory >= 30e9
    # Enough work for all cores. The states of all steps take up to 16 GB, with the smaller width a
    # quarter of that; those of updates take a quarter of the memory.
    replicas = ["--replicas", str(device.count)] if several else ["--replicas", "4", "--virtual"]
    megabytes = max(16, min(1000, int(device.memory / 80e6)))
    steps = [
        "all_reduce",
        "average",
        "local step, host",
        "slow step, sharded",
        "outer",
        "peer, host",
    ]
    ways = ["whole batch", "by hand", "GPipe", "1F1B", "ZB-H1"]
    return [
        Part("Update bandwidth", script("bench_update.py", "--megabytes", megabytes)),
        Part("Tests", tests(), 2, {"JAXSLOWMO_TEST_PLATFORM": "cuda"}),
        Part(
            "Steps",
            script(
                *("bench_step.py", *replicas, "--width", 2048 if is_large else 1024),
                *("--batch", 4096, "--rounds", 40, "--only", *steps),
            ),
            2,
        ),
        Part(
            "Pipelines",
            script(
                *("bench_pipeline.py", "--platform", "cuda,cpu", "--stages", min(4, device.count)),
                *("--width", 512, "--context", 512, "--examples", 4 if is_large else 1),
                *("--compile", "--compile-blocks", "--only", *ways),
            ),
            3,
        ),
        Part("Demo", demo(folder, "--preset", "demo"), 2),
        Part(
            "Step of the preset 124m",
            script("bench_gpt_step.py", "--attention", "cudnn", "--windows", 32 if is_large else 1),
            2,
        ),
    ]


def tiny_parts(folder: Path) -> list[Part]:
    """Return the same parts for a CPU, as small as can be."""
    model = ["--blocks", 2, "--width", 16, "--context", 8, "--microbatches", 2, "--rounds", 1]
    few = ["--compile", "--compile-blocks", "--only", "host, 1F1B"]
    step = ["--replicas", 2, "--virtual", "--width", 16, "--batch", 2, "--rounds", 1]
    one = ["--algorithms", "local_sgd", "--steps", 2, "--replicas", 2]
    return [
        Part("Update bandwidth", script("bench_update.py", "--megabytes", 1, "--leaves", 2)),
        Part(
            "Tests", tests("-k", "holds_the_bits"), environment={"JAXSLOWMO_TEST_PLATFORM": "cpu"}
        ),
        Part("Steps", script("bench_step.py", *step, "--only", "local step, host")),
        Part("Pipelines", script("bench_pipeline.py", "--stages", 1, *model, *few)),
        Part("Demo", demo(folder, "--preset", "tiny", *one)),
        Part(
            "Step of the preset tiny",
            script(
                *("bench_gpt_step.py", "--preset", "tiny", "--windows", 1, "--steps", 1),
                *("--product", 64),
            ),
        ),
    ]


def script(name: str, *arguments: object) -> list[str]:
    return [sys.executable, f"benchmarks/{name}", *map(str, arguments)]


def tests(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-v", "-m", "hardware", "tests/hardware", *arguments]


def demo(folder: Path, *arguments: object) -> list[str]:
    out = ["--out", str(folder / "demo"), "--overwrite"]
    return [sys.executable, "-m", "jaxslowmo", "compare", *out, *map(str, arguments)]


def run_part(part: Part, seconds: float, environment: Mapping[str, str]) -> Result:
    """Run a part for so many seconds at most; its processes are gone when this returns."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        try:
            process = subprocess.Popen(
                part.command,
                cwd=ROOT,
                env={**environment, **part.environment},
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        except OSError as error:
            return Result(part, f"did not start: {error}", 0.0, "", "")
        try:
            code = process.wait(timeout=seconds)
            outcome = "ok" if code == 0 else f"ended with {code}"
        except subprocess.TimeoutExpired:
            outcome = f"ended after its limit of {seconds:.0f} seconds"
        finally:
            end(process)
        return Result(part, outcome, time.monotonic() - began, last_lines(out), last_lines(err))


def end(process: subprocess.Popen) -> None:
    """Kill a process and all that it has started, which may hold memory of the GPU."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_lines(file: IO[str]) -> str:
    file.seek(0)
    text = file.read().replace(str(ROOT), ".")  # a result has no paths of its machine
    return "\n".join(text.splitlines()[-LAST_LINES:])


def run_parts(
    parts: Sequence[Part], minutes: float, environment: Mapping[str, str]
) -> Iterator[Result]:
    """Run the parts in turn, and yield their results; they take so many minutes at most.

    What a part leaves of its share goes to those after it.
    """
    ends = time.monotonic() + 60 * minutes
    for i, part in enumerate(parts):
        left = max(0.0, ends - time.monotonic())
        share = part.weight / sum(other.weight for other in parts[i:])
        yield run_part(part, left * share, environment)


def page(device: Device, results: Sequence[Result], missing: int, command: str) -> str:
    """Return the result file.

    Args:
      device: what the parts ran on.
      results: of the parts that have ended.
      missing: number of parts that have not.
      command: how this program was called.
    """
    lines = ["# A GPU measured", "", f"`{command}`", ""]
    lines += [f"- {name}: {value}" for name, value in device.facts.items()]
    lines += ["", "| part | outcome | seconds |", "|---|---|---:|"]
    lines += [f"| {r.part.name} | {r.outcome} | {r.seconds:.0f} |" for r in results]
    if missing:
        lines += ["", f"**Parts that have not ended: {missing}.**"]
    for result in results:
        lines += ["", f"## {result.part.name}", "", f"`{shown(result.part)}`"]
        lines += fenced(result.output)
        if result.outcome != "ok":
            lines += ["", f"**{result.outcome}**", *fenced(result.errors)]
    return "\n".join(lines) + "\n"


def shown(part: Part) -> str:
    """Return the command of a part, without the paths of this machine."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in part.environment.items()]
    return " ".join([*variables, shlex.join(["python", *part.command[1:]])])


def fenced(text: str) -> list[str]:
    return ["", "```text", text, "```"] if text.strip() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu_day.md"))
    parser.add_argument("--minutes", type=float, default=10.0, help="for all parts together")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on a CPU")
    parser.add_argument("--only", nargs="+", help="parts whose names contain one of these")
    arguments = parser.parse_args()
    platform = "cpu" if arguments.tiny else "cuda"
    try:
        device = probe(platform)
    except NoDevice as error:
        hint = "" if arguments.tiny else " `--tiny` tries this program on a CPU."
        raise SystemExit(f"gpu_day.py: no GPU that jax can use: {error}.{hint}") from None
    command = shlex.join(["python", "benchmarks/gpu_day.py", *sys.argv[1:]])
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts = tiny_parts(folder) if arguments.tiny else parts_of(device, folder)
        wanted = arguments.only or [""]
        parts = [part for part in parts if any(word in part.name for word in wanted)]
        if not parts:
            raise SystemExit(f"gpu_day.py: no part has one of {wanted} in its name.")
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        for result in run_parts(parts, arguments.minutes, environment_on(platform)):
            results.append(result)
            print(f"{result.part.name}: {result.outcome}, {result.seconds:.0f} s", flush=True)
            text = page(device, results, len(parts) - len(results), command)
            arguments.out.write_text(text.replace(name, "DIR"), "utf-8")
    print(f"Written to {arguments.out}")


if __name__ == "__main__":
    main()
