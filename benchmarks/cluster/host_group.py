"""The processes of one library, one per host."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
for folder in (HERE.parent / "reducer", ROOT / "tests" / "cluster"):
    sys.path.insert(0, str(folder))

from group import Group  # noqa: E402
from group import medians as medians  # noqa: E402
from namespaces import Host  # noqa: E402


class HostGroup(Group):
    """Workers on hosts, started with: address of the first, port, rank, number, further arguments.

    They answer one line of JSON per line of JSON, see `turns.py`.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        python: str,
        script: str,
        port: int,
        env: Mapping[str, str],
        *arguments: str,
    ):
        self.name = script
        folders = (HERE, HERE.parent / "reducer", HERE.parent, ROOT)
        own = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
        own |= {"PYTHONPATH": os.pathsep.join(map(str, folders)), **env}
        self.processes = []
        try:
            for rank, host in enumerate(hosts):
                start = [hosts[0].address, str(port), str(rank), str(len(hosts)), *arguments]
                self.processes.append(
                    subprocess.Popen(
                        [*host.command, python, str(HERE / script), *start],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        bufsize=0,
                        env=own,
                        start_new_session=True,  # Ctrl-C is for the driver, which ends them
                    )
                )
            self.facts = self.answers(180)[0]
        except BaseException:
            self.close()
            raise
