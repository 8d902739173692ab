"""Real processes that join, or cannot."""

import os
import socket
import subprocess
import sys

JOINS = """
import sys
from pathlib import Path
from jaxslowmo.cli.config._cluster import ClusterConfig
from jaxslowmo.cli.processes._join import join_cluster
join_cluster(ClusterConfig(coordinator=sys.argv[1], num_processes=1, process_id=0))
listening = "0A"
for table in ("tcp", "tcp6"):
    for line in Path("/proc/net", table).read_text().splitlines()[1:]:
        _, address, _, state, *_ = line.split()
        if state == listening:
            print(address)
"""


def test_the_runtime_listens_at_no_other_address():
    """As /proc tells it: the four bytes of 127.0.0.1 from the last to the first, the port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    done = subprocess.run(
        [sys.executable, "-c", JOINS, f"127.0.0.1:{port}"],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = [line for line in done.stdout.split() if int(line.rpartition(":")[2], 16) == port]
    assert [line.rpartition(":")[0][-8:] for line in found] == ["0100007F"]


def test_a_process_that_cannot_listen_ends_with_one_line(tmp_path):
    """Through its parent, which does not start it again."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [
                *(sys.executable, "-m", "jaxslowmo", "train", "--preset", "tiny"),
                *("--coordinator", f"127.0.0.1:{port}", "--num-processes", "2"),
                *("--process-id", "0", "--restarts", "3", "--out", str(tmp_path)),
            ],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            timeout=120,
        )
    line = f"error: --coordinator: port {port} of this host is taken by another program\n"
    assert (done.returncode, done.stderr) == (2, line)
