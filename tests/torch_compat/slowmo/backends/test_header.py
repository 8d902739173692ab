"""Processes that make different calls: all say in one sentence who came to which exchange."""

import subprocess
import sys

import pytest
import slowmo_here as here
import torch
from slowmo_models import Script, message_of
from slowmo_spawned import BACKENDS, spawned

from support.waiting import PATIENCE_SECONDS


def after_a_step(call, *more, **options) -> str:
    """What `call(script)` says, after a step that is alike in all processes."""
    script = Script(*more, **{"nprocs_per_node": 1, "localsgd_frequency": 1, **options})
    script.step(0)
    return message_of(lambda: call(script))


def evaluation_in_training_mode():
    def go_on(script):
        if here.rank() == 0:
            with torch.no_grad():
                script.net(torch.ones(2, Script.width).to(here.device()))
        script.step(1)

    return after_a_step(go_on, torch.nn.BatchNorm1d(Script.width))


def without_a_backward_pass():
    def go_on(script):
        if here.rank() != 3:
            script.backward(1)
        script.update()

    return after_a_step(go_on, nprocs_per_node=2)


def gossip_and_average():
    """Pairs that exchange with each other, of which one takes an exact slow step instead."""
    options = {"slowmo_base_algorithm": "sgp", "graph": "ring"}
    options["slowmo_frequency"] = 2 if here.rank() in (1, 3) else 50
    return after_a_step(lambda script: [script.step(t) for t in range(3)], **options)


def two_wrappers_in_another_order():
    """Sizes and kinds are alike: the parameters of one would be averaged with the other's."""
    other = Script(nprocs_per_node=1, localsgd_frequency=1)
    other.step(0)

    def go_on(script):
        for one in [script, other] if here.rank() else [other, script]:
            one.update()

    return after_a_step(go_on)


BUFFERS = "came to the broadcast of buffers before a forward pass"
GRADIENTS = "came to the average of gradients in the node after a backward pass"
AVERAGE = "came to the average of parameters in perform_slowmo()"
# The number of processes, what they do, and what all of them are told.
UNLIKE = {
    "evaluation in training mode": (
        *(2, evaluation_in_training_mode),
        [
            f"process 0 {BUFFERS} (40 bytes, after 1 call of perform_slowmo() in 1 step)",
            f"process 1 {AVERAGE} (264 bytes, after 1 call of perform_slowmo() in 1 step)",
        ],
    ),
    "wrappers in another order": (
        *(2, two_wrappers_in_another_order),
        [f"process 0 {AVERAGE}", "after 1 call of perform_slowmo() in 1 step of wrapper 2)"],
    ),
    # Nodes are told of each other's trouble, too.
    "no backward pass": (
        *(4, without_a_backward_pass),
        [f"process 2 {GRADIENTS}", f"process 3 {AVERAGE}"],
    ),
    "gossip beside an average": (
        *(4, gossip_and_average),
        ["came to the exchange of parameters with peers", "came to the slow step"],
    ),
}


@pytest.mark.parametrize(
    ("case", "by"),
    [(case, "gloo") for case in UNLIKE]
    + [(case, by) for case in list(UNLIKE)[:2] for by in BACKENDS[1:]],
)
def test_unlike_calls_are_explained_by_all(case, by):
    world, function, parts = UNLIKE[case]
    for message in spawned(world, function, by=by):
        assert message.startswith("Processes must make the same calls in the same order")
        assert all(part in message for part in parts), message
        assert "\n" not in message


PROGRAM = """
import sys, torch, torch.distributed as dist
from torch_compat.slowmo import SlowMoDistributedDataParallel
rank, address = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
module = torch.nn.Linear(3, 2)
net = SlowMoDistributedDataParallel(module, 1, localsgd_frequency=1 + rank, init_sync=False)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(2):
    net(torch.ones(2, 3)).sum().backward()
    net.perform_slowmo(optimizer)
"""


def test_programs_that_do_not_catch_it_end(tmp_path):
    """Their exchanges that wait for others would keep interpreters from ending."""
    call = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    processes = [
        subprocess.Popen([*call, rank, f"file://{tmp_path}/store"], stderr=subprocess.PIPE)
        for rank in "01"
    ]
    errors = [process.communicate(timeout=PATIENCE_SECONDS)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1], errors
    for error in errors:
        assert b"UnlikeCallsError: Processes must make the same calls" in error
