"""The processes of one library: start them, ask them all the same, read all their answers."""

import json
import os
import selectors
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Group:
    """`world` workers that answer one line of JSON per line of JSON."""

    def __init__(self, python: str, script: str, world: int, model: str, env: dict[str, str]):
        port = free_port()
        self.name = script
        path = os.pathsep.join(map(str, (HERE, HERE.parent, HERE.parent.parent)))
        self.processes = [
            subprocess.Popen(
                [python, str(HERE / script), str(port), str(rank), str(world), model],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,  # else a line could wait in a buffer where `select` does not see it
                env={**os.environ, "PYTHONPATH": path, **env},
            )
            for rank in range(world)
        ]
        self.facts = self.answers(120)[0]

    def ask(self, variant: str, steps: int = 0, seconds: float = 120) -> list[dict]:
        line = json.dumps({"variant": variant, "steps": steps}) + "\n"
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(line.encode())
            process.stdin.flush()
        return self.answers(seconds)

    def answers(self, seconds: float) -> list[dict]:
        """One answer of every worker, by rank; raises if one leaves or takes too long."""
        deadline = time.monotonic() + seconds
        return [self.answer(process, deadline) for process in self.processes]

    def answer(self, process: subprocess.Popen, deadline: float) -> dict:
        assert process.stdout is not None
        with selectors.DefaultSelector() as ready:
            ready.register(process.stdout, selectors.EVENT_READ)
            while ready.select(max(0, deadline - time.monotonic())):
                line = process.stdout.readline().decode()
                if line.startswith("ANSWER "):
                    return json.loads(line.removeprefix("ANSWER "))
                if not line:
                    raise RuntimeError(f"{self.name} has left with {process.wait()}.")
        raise TimeoutError(f"{self.name} did not answer in time.")

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.communicate()


def loopback_bytes() -> int:
    """Bytes that the loopback interface has sent since the machine started."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[8])
    raise RuntimeError("/proc/net/dev has no interface `lo`.")


def medians(rounds: Sequence[float]) -> dict[str, float]:
    """Median, and the quarter and three-quarter points between which half of the rounds lie."""
    values = sorted(rounds)

    def at(share: float) -> float:
        place = share * (len(values) - 1)
        low = int(place)
        high = min(low + 1, len(values) - 1)
        return values[low] + (place - low) * (values[high] - values[low])

    return {"median": at(0.5), "low": at(0.25), "high": at(0.75)}
