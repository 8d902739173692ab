"""Real processes that join, or cannot."""

import os
import socket
import subprocess
import sys

from support.waiting import PATIENCE_SECONDS

JOINS = """
import sys
from pathlib import Path
from jaxslowmo.cli.config._cluster import ClusterConfig
from jaxslowmo.cli.processes._watch import join_cluster
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
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    found = [line for line in done.stdout.split() if int(line.rpartition(":")[2], 16) == port]
    assert [line.rpartition(":")[0][-8:] for line in found] == ["0100007F"]


def test_where_the_port_is_taken_each_process_ends_with_one_line(tmp_path):
    """Before one of them imports jax, and without another start."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        processes = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "jaxslowmo", "train", "--preset", "tiny"),
                    *("--coordinator", f"127.0.0.1:{port}", "--num-processes", "2"),
                    *("--process-id", str(i), "--restarts", "3", "--out", str(tmp_path)),
                    # Far longer than the test waits.
                    *("--startup-timeout", "3000"),
                ],
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
                stderr=subprocess.PIPE,
                text=True,
            )
            for i in range(2)
        ]
        try:
            said = [process.communicate(timeout=PATIENCE_SECONDS)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
    assert said == [
        f"error: --coordinator: port {port} of this host is taken by another program\n",
        f"error: --coordinator: 127.0.0.1:{port} is taken by another program: it does not "
        "answer as process 0 would\n",
    ]
    assert [process.returncode for process in processes] == [2, 2]
