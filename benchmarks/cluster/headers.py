"""Measure what headers of torch_compat's exchanges and broadcasts of buffers cost per step.

    sudo .venv-torchax/bin/python benchmarks/cluster/headers.py --out benchmarks/results/headers

The same steps run in turns with headers and without them, in one run; so do local steps of
convolutions with BatchNorm, for each way to treat buffers. Hosts are network namespaces
whose links tbf shapes; a relay in the place of their bridge holds every frame back, since not all
kernels have netem.
"""

import argparse
import contextlib
import ctypes
import fcntl
import heapq
import itertools
import json
import os
import select
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "cluster")]
WIDTH = 256  # four layers of it: a model of 1.05 MB
VARIANTS = {
    "LocalSGD(1)": {"localsgd_frequency": 1, "slowmo_momentum": 0.0},
    "SGP": {"slowmo_base_algorithm": "sgp", "slowmo_momentum": 0.0},
}


# Six of (convolution, BatchNorm) of 16 channels, on 8 images of 16 x 16.
BUFFERS = {"True": True, "average": "average", "False": False}


def worker(rank: int, world: int, address: str, port: str, rounds: int, steps: int) -> None:
    import torch
    import torch.distributed as dist

    from torch_compat.slowmo import SlowMoDistributedDataParallel, broadcast_parameters
    from torch_compat.slowmo.backends import Exchange, Kind
    from torch_compat.slowmo.backends._distributed import DistributedBackend

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}:{port}", rank=rank, world_size=world
    )
    meet = DistributedBackend.meet
    torch.manual_seed(0)
    x = torch.randn(8, WIDTH)
    times: dict[str, list[float]] = {}

    def timed(name: str, call) -> None:
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            call()
        times.setdefault(name, []).append((time.perf_counter() - begin) / steps)

    runs = {}
    for name, options in VARIANTS.items():
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        broadcast_parameters(module := torch.nn.Sequential(*layers))
        net = SlowMoDistributedDataParallel(module, 1, **options)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

        def step(net=net, optimizer=optimizer) -> None:
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            net.perform_slowmo(optimizer)

        runs[name] = step
        step()
    images = torch.randn(8, 3, 16, 16)
    for name, mode in BUFFERS.items():
        channels = [3, *[16] * 6]
        blocks = [
            torch.nn.Sequential(torch.nn.Conv2d(a, b, 3, padding=1), torch.nn.BatchNorm2d(b))
            for a, b in itertools.pairwise(channels)
        ]
        broadcast_parameters(module := torch.nn.Sequential(*blocks))
        net = SlowMoDistributedDataParallel(
            module,
            1,
            broadcast_buffers=mode,
            localsgd_frequency=10**6,
            slowmo_momentum=0.0,
        )
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

        def local_step(net=net, optimizer=optimizer) -> None:
            net(images).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            net.perform_slowmo(optimizer)

        runs[f"buffers {name}"] = local_step
        local_step()
    backend, header = DistributedBackend(), Exchange(Kind.AVERAGE, 1, 1)
    for _ in range(rounds):
        timed("header", lambda: meet(backend, header, torch.device("cpu")))
        for name in BUFFERS:
            timed(f"buffers {name}", runs[f"buffers {name}"])
        for name in VARIANTS:
            step = runs[name]
            timed(f"{name} with", step)
            DistributedBackend.meet = lambda *_: {}
            timed(f"{name} without", step)
            DistributedBackend.meet = meet
    if rank == 0:
        print(json.dumps(times), flush=True)
    dist.barrier()
    os._exit(0)


def relay(ports: int, delay: float) -> None:
    """Forward frames between port0, port1, ... of this namespace, `delay` seconds later."""
    kind = socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)
    sockets = [socket.socket(*kind) for _ in range(ports)]
    for i, one in enumerate(sockets):
        one.bind((f"port{i}", 0))
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**24)
    homes: dict[bytes, int] = {}
    queue: list[tuple[float, int, bytes, int]] = []
    number = 0
    print("ready", flush=True)
    while True:
        wait = max(queue[0][0] - time.monotonic(), 0) if queue else None
        for one in select.select(sockets, [], [], wait)[0]:
            frame, origin = one.recvfrom(65536)
            if origin[2] != socket.PACKET_OUTGOING:
                source = sockets.index(one)
                homes[frame[6:12]] = source
                number += 1
                heapq.heappush(queue, (time.monotonic() + delay, number, frame, source))
        while queue and queue[0][0] <= time.monotonic():
            _, _, frame, source = heapq.heappop(queue)
            home = homes.get(frame[:6])
            for target in [home] if home is not None else set(range(ports)) - {source}:
                sockets[target].send(frame)


def complete_checksums() -> None:
    """Let the kernel fill in checksums, which a relay needs, and send frames of one packet."""
    for command in (0x17, 0x1F, 0x24):  # ETHTOOL_STXCSUM, ETHTOOL_STSO, ETHTOOL_SGSO
        value = ctypes.create_string_buffer(struct.pack("II", command, 0), 8)
        request = struct.pack("16sP16x", b"eth0", ctypes.addressof(value))
        with socket.socket() as any_socket:
            fcntl.ioctl(any_socket, 0x8946, request)  # SIOCETHTOOL


def run(commands: list[list[str]], args: argparse.Namespace, address: str, env: dict) -> dict:
    port = str(20000 + os.getpid() % 20000)
    arguments = [str(len(commands)), address, port, str(args.rounds), str(args.steps)]
    processes = [
        subprocess.Popen(
            [*prefix, sys.executable, "-W", "ignore", __file__, "--worker", str(rank), *arguments],
            stdout=subprocess.PIPE if rank == 0 else None,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        )
        for rank, prefix in enumerate(commands)
    ]
    output = processes[0].communicate()[0].decode().strip().splitlines()[-1]
    for process in processes:
        process.wait()
    return summary(json.loads(output))


def summary(times: dict[str, list[float]]) -> dict:
    row = {"header_ms": round(1000 * statistics.median(times["header"]), 3)}
    for name in VARIANTS:
        pairs = list(zip(times[f"{name} with"], times[f"{name} without"], strict=True))
        row[f"{name} ms"] = round(1000 * statistics.median(a for a, _ in pairs), 2)
        row[f"{name} ratio"] = round(statistics.median(a / b for a, b in pairs), 3)
    for name in ("True", "average"):
        pairs = zip(times[f"buffers {name}"], times["buffers False"], strict=True)
        row[f"buffers {name} ratio"] = round(statistics.median(a / b for a, b in pairs), 3)
    return row


@contextlib.contextmanager
def delayed(found: list, delay: float) -> Iterator[None]:
    """A relay takes the place of the bridge between hosts."""
    hub = found[0].name.rpartition("-")[0] + "-hub"
    for i, host in enumerate(found):
        port = ["link", "set", f"port{i}", "nomaster", "mtu", "9000"]
        subprocess.run(["ip", "-n", hub, *port], check=True)
        interface = ["link", "set", "eth0", "mtu", "9000"]
        subprocess.run(["ip", "-n", host.name, *interface], check=True)
        subprocess.run([*host.command, sys.executable, __file__, "--checksums"], check=True)
    inside = ["ip", "netns", "exec", hub]
    process = subprocess.Popen(
        [*inside, sys.executable, __file__, "--relay", str(len(found)), str(delay)],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield
    finally:
        process.kill()


def on_links(args: argparse.Namespace, count: int, rate: str, delay: float) -> dict:
    from namespaces import hosts

    with hosts(count, rate) as found:
        commands, env = [host.command for host in found], {"GLOO_SOCKET_IFNAME": "eth0"}
        with delayed(found, delay) if delay else contextlib.nullcontext():
            return run(commands, args, found[0].address, env)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = {}
    for count in (2, 4, 8):
        rows[f"loopback, {count} processes"] = run([[]] * count, args, "127.0.0.1", {})
        print(count, rows, flush=True)
    for count, rate, delay in ((4, "200mbit", 0.0), (2, "200mbit", 0.01), (4, "200mbit", 0.01)):
        name = f"{count} hosts, {rate}, {1000 * delay:.0f} ms one way"
        rows[name] = on_links(args, count, rate, delay)
        print(name, rows[name], flush=True)
    title = str(__doc__).splitlines()[0]
    lines = ["# What headers and buffers cost", "", f"`benchmarks/cluster/headers.py`: {title}", ""]
    lines.append(
        "ms: of one header after the other, and of a step; ratios: a step with headers to one "
        "without, and a local step of a small net with BatchNorm to one with "
        f"broadcast_buffers=False; medians over rounds of one run. {os.cpu_count()} cores for all "
        f"processes; load average {os.getloadavg()[0]:.1f}. Headers: a model of 1.05 MB."
    )
    columns = list(next(iter(rows.values())))
    lines += ["", f"| | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    for name, row in rows.items():
        lines.append(f"| {name} | {' | '.join(str(row[column]) for column in columns)} |")
    print("\n".join(lines))
    if args.out:
        args.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
        args.out.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        rank, world, address, port, rounds, steps = sys.argv[2:]
        worker(int(rank), int(world), address, port, int(rounds), int(steps))
    elif sys.argv[1:2] == ["--relay"]:
        relay(int(sys.argv[2]), float(sys.argv[3]))
    elif sys.argv[1:2] == ["--checksums"]:
        complete_checksums()
    else:
        main()
