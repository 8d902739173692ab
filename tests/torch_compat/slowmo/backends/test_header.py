"""Processes that make different calls: all say in one sentence who came to which exchange."""

import subprocess
import sys

import numpy as np
import slowmo_here as here
import torch
from slowmo_models import values
from slowmo_spawned import spawned

from support.waiting import PATIENCE_SECONDS
from torch_compat.errors import UnlikeCallsError
from torch_compat.slowmo import SlowMoDistributedDataParallel


class Training:
    """A wrapped model and its training steps on a few constant samples."""

    def __init__(self, *, batch_norm: bool = False, **options) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(4, 3), *([torch.nn.BatchNorm1d(3)] if batch_norm else [])]
        for parameter in layers[0].parameters():
            torch.nn.init.constant_(parameter, 0.5)  # threads of one process share random numbers
        self.samples = torch.arange(8.0).reshape(2, 4).to(here.device()) + here.rank()
        self.net = SlowMoDistributedDataParallel(
            torch.nn.Sequential(*layers).to(here.device()),
            **{"nprocs_per_node": 1, "localsgd_frequency": 1, **options},
        )
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def backward(self) -> None:
        self.net(self.samples).square().sum().backward()

    def update(self) -> None:
        self.optimizer.step()
        self.net.zero_grad()
        self.net.perform_slowmo(self.optimizer)
        here.launch()

    def step(self) -> None:
        self.backward()
        self.update()


def message_of(call) -> str:
    try:
        call()
    except UnlikeCallsError as error:
        return str(error)
    return "no error"


def evaluation_by_process_0(evaluates: bool):
    training = Training(batch_norm=True)
    outputs = []
    for _ in range(3):
        training.step()
        if evaluates and here.rank() == 0:
            training.net.eval()
            with torch.no_grad():
                outputs.append(training.net(training.samples))
            here.launch()
            training.net.train()
    return values(training.net.module), [output.cpu().numpy() for output in outputs]


def test_evaluation_by_one_process_alone_changes_nothing(by):
    (with_evaluation, others), (without, _) = (
        spawned(2, evaluation_by_process_0, evaluates, by=by) for evaluates in (True, False)
    )
    assert len(with_evaluation[1]) == 3
    assert np.isfinite(with_evaluation[1]).all()
    for key, value in without[0].items():
        assert np.array_equal(with_evaluation[0][key], value), key
    assert others[1] == []


def evaluation_in_training_mode():
    training = Training(batch_norm=True)
    training.step()

    def go_on():
        if here.rank() == 0:
            with torch.no_grad():
                training.net(training.samples)
        training.step()

    return message_of(go_on)


BUFFERS = "the broadcast of buffers before a forward pass"
GRADIENTS = "the average of gradients in the node after a backward pass"
AVERAGE = "the average of parameters in perform_slowmo()"


def test_evaluation_in_training_mode_by_one_process_is_explained_by_all(by):
    first, second = spawned(2, evaluation_in_training_mode, by=by)
    assert first == second
    assert first.startswith("Processes must make the same calls in the same order, but process 0")
    assert f"process 0 came to {BUFFERS} (32 bytes, after 1 update)" in first
    assert f"process 1 came to {AVERAGE} (84 bytes, after 1 update)" in first
    assert "\n" not in first


def another_step(late: int):
    training = Training(batch_norm=True)
    training.step()

    def go_on():
        if here.rank() == late:
            training.update()
        training.step()

    return message_of(go_on)


def test_one_perform_slowmo_more_than_the_others():
    messages = spawned(3, another_step, 2)
    assert len(set(messages)) == 1
    assert f"processes 0, 1 came to {BUFFERS}" in messages[0]
    assert f"process 2 came to {AVERAGE}" in messages[0]


def of_another_frequency():
    training = Training(localsgd_frequency=2 + here.rank(), slowmo_frequency=60)
    return message_of(lambda: [training.step() for _ in range(6)])


def test_other_frequencies():
    first, second = spawned(2, of_another_frequency)
    assert first == second
    assert f"process 0 came to {AVERAGE} (60 bytes, after 1 update)" in first
    assert f"process 1 came to {AVERAGE} (60 bytes, after 2 updates)" in first


def without_a_backward_pass():
    training = Training(nprocs_per_node=2)
    training.step()

    def go_on():
        if here.rank() != 3:
            training.backward()
        training.update()

    return message_of(go_on)


def test_a_process_of_a_node_without_its_backward_pass():
    messages = spawned(4, without_a_backward_pass)
    # Nodes are told of each other's trouble, too.
    assert len(set(messages)) == 1
    assert f"process 2 came to {GRADIENTS}" in messages[0]
    assert f"process 3 came to {AVERAGE}" in messages[0]


def a_node_without_its_backward_pass():
    training = Training(nprocs_per_node=2)
    training.step()
    if here.rank() < 2:
        training.backward()
    training.update()
    return values(training.net.module)


def test_nodes_may_differ_in_their_backward_passes():
    first, *others = spawned(4, a_node_without_its_backward_pass)
    for other in others:
        assert all(np.array_equal(first[key], other[key]) for key in first)


def gossip_and_average():
    """Pairs that exchange with each other, of which one takes an exact slow step instead."""
    training = Training(
        slowmo_base_algorithm="sgp",
        slowmo_frequency=2 if here.rank() in (1, 3) else 50,
        graph="ring",
    )
    return message_of(lambda: [training.step() for _ in range(4)])


def test_gossip_beside_an_exact_average():
    messages = spawned(4, gossip_and_average)
    for message in messages:
        assert "the exchange of parameters with peers" in message
        assert "the slow step" in message


def two_wrappers_in_another_order():
    first, second = Training(), Training()
    order = [first, second] if here.rank() == 0 else [second, first]
    return message_of(lambda: [one.update() for one in order])


def test_wrappers_that_are_called_in_another_order(by):
    """Sizes and kinds are alike: the parameters of one would be averaged with the other's."""
    first, second = spawned(2, two_wrappers_in_another_order, by=by)
    assert first == second
    assert "process 0 came to the average of parameters" in first
    assert "after 0 updates of wrapper 2)" in first


def test_programs_that_do_not_catch_it_end(tmp_path):
    """Their exchanges that wait for others would keep interpreters from ending."""
    program = (
        "import sys, torch, torch.distributed as dist\n"
        "from torch_compat.slowmo import SlowMoDistributedDataParallel\n"
        "rank = int(sys.argv[1])\n"
        f"dist.init_process_group('gloo', init_method='file://{tmp_path}/store', rank=rank, "
        "world_size=2)\n"
        "net = SlowMoDistributedDataParallel(torch.nn.Linear(3, 2), 1, localsgd_frequency=1 + rank,"
        " check_start=False)\n"
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "for _ in range(2):\n"
        "    net(torch.ones(2, 3)).sum().backward()\n"
        "    net.perform_slowmo(optimizer)\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", program, str(rank)], stderr=subprocess.PIPE
        )
        for rank in (0, 1)
    ]
    errors = [process.communicate(timeout=PATIENCE_SECONDS)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1], errors
    for error in errors:
        assert b"UnlikeCallsError: Processes must make the same calls" in error
