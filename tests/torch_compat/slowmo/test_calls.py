"""Scripts that leave out `perform_slowmo`, or call it too often, and those that do neither."""

import copy
import re
from types import SimpleNamespace

import pytest
import slowmo_here as here
import torch
from slowmo_models import Perceptron, batch
from slowmo_spawned import BACKENDS, spawned, spawned_at_once

from torch_compat.errors import PeerLostError, UnlikeCallsError
from torch_compat.slowmo import SlowMoDistributedDataParallel as SlowMo
from torch_compat.slowmo import _steps

WIDTH, STEPS, FREQUENCY = 4, 12, 6
WARNINGS: list[str] = []  # of all processes that are threads of this one


class Script:
    """A model and its training loop."""

    def __init__(self, **options) -> None:
        # `warnings.catch_warnings` is no help: threads share it.
        _steps.warnings = SimpleNamespace(warn=lambda text, **_: WARNINGS.append(text))
        options = {"nprocs_per_node": 1, "slowmo_frequency": FREQUENCY, **options}
        self.net = SlowMo(Perceptron(WIDTH, 6).to(here.device()), **options)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)

    def backward(self, t: int, module=None) -> torch.Tensor:
        x, y = (torch.tensor(part).to(here.device()) for part in batch(t, here.rank(), WIDTH))
        loss = (((module or self.net)(x) - y) ** 2).mean()
        loss.backward()
        return loss

    def run(self, calls=lambda t: 1) -> tuple[str, list[str]]:
        """The error of a script with `calls(t)` calls after step t, and its warnings."""
        said = "no error"
        try:
            for t in range(STEPS):
                self.net.zero_grad()
                self.backward(t)
                self.optimizer.step()
                for _ in range(int(calls(t))):
                    self.net.perform_slowmo(self.optimizer)
                here.launch()
        except (UnlikeCallsError, PeerLostError) as error:
            said = str(error)
        return said, [text for text in WARNINGS if f"process {here.rank()} of 2" in text]


# How often process 1 calls `perform_slowmo` after step t (process 0 does it once), and options.
CALLS = {
    "skipped once": (lambda t: t != 4, {}),
    "skipped at the start": (lambda t: t > 0, {"localsgd_frequency": 100}),
    "skipped every other time": (lambda t: t % 2, {"slowmo_base_algorithm": "sgp"}),
    "called twice": (lambda t: 1 + (t == 4), {"slowmo_momentum": 0.0, "localsgd_frequency": 2}),
    "skipped at the end": (lambda t: t != STEPS - 2, {}),
    "called by process 0 alone": (lambda t: 0, {}),
}


def misused(case):
    calls, options = CALLS[case]
    return Script(**options).run(calls if here.rank() else lambda t: 1)


@pytest.mark.parametrize(
    ("case", "by"),
    [*((case, "gloo") for case in list(CALLS)[:4]), *(("skipped once", by) for by in BACKENDS[1:])],
)
def test_the_next_exchange_names_calls_and_steps_of_each_process(case, by):
    for message, warned in spawned(2, misused, case, by=by):
        counts = re.findall(r"after (\d+) calls? of perform_slowmo\(\) in (\d+) steps?", message)
        (calls, steps), (calls_of_1, steps_of_1) = counts
        assert message.startswith("Processes must make the same calls"), message
        assert calls == steps == calls_of_1
        missed = int(steps_of_1) - int(steps)
        assert missed == -1 if case == "called twice" else missed > 0, message
        assert not warned


def test_a_process_that_ends_is_named_with_its_last_exchange():
    cases = {"skipped at the end": "8", "called by process 0 alone": "0"}
    groups = spawned_at_once(2, misused, [(case,) for case in cases])
    for ((message, warned), (said, warned_1)), last in zip(groups, cases.values(), strict=True):
        assert message.startswith("Process 1 of 2 ")
        assert re.findall(r"that of process 1 was .*?after (\d+) call", message) == [last]
        assert re.search(r"this process is in .*after (\d+) call", message)
        assert (said, warned) == ("no error", [])
        assert len(warned_1) == (last == "0")


def accumulated(script: Script) -> None:
    for t in range(STEPS):
        with script.net.no_sync():
            for k in range(FREQUENCY * 3):
                script.backward(t + k)
        for k in range(FREQUENCY * (1 + here.rank())):
            script.backward(t + k)
        script.optimizer.step()
        script.net.perform_slowmo(script.optimizer)


def evaluated_by_process_0(script: Script) -> None:
    for t in range(STEPS):
        script.backward(t)
        script.optimizer.step()
        for is_training in (True, False):
            script.net.train(is_training)
            if here.rank() == 0:
                script.backward(t)  # in training mode, too, where there are no buffers
        script.net.train()
        script.net.zero_grad()
        script.net.perform_slowmo(script.optimizer)
        if here.rank() == 0:
            script.net(torch.ones(1, WIDTH))


def steps_left_out(script: Script) -> None:
    """Leave out a step in one process, as a GradScaler does with infinite gradients."""
    for t in range(STEPS):
        script.backward(t)
        if here.rank() == 0 or t % 4:
            script.optimizer.step()
        script.net.perform_slowmo(script.optimizer)


def closures(script: Script) -> None:
    optimizer = torch.optim.LBFGS(script.net.parameters(), max_iter=5 + 20 * here.rank())
    for t in range(STEPS):

        def closure(t=t):
            script.net.zero_grad()
            return script.backward(t)

        optimizer.step(closure)
        script.net.perform_slowmo(optimizer)


def by_turns(script: Script) -> None:
    """Two optimizers, and one of others that the wrapper knows nothing of."""
    params = [*script.net.parameters()]
    optimizers = [torch.optim.SGD(part, lr=0.01) for part in (params[:1], params[1:])]
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    for t in range(STEPS):
        script.backward(t)
        optimizers[t % 2].step()
        for _ in range(FREQUENCY * here.rank() * 2):
            other.step()
        script.net.perform_slowmo(optimizers)


def copied(script: Script) -> None:
    """A copy that is trained by process 0 alone, which does not exchange."""
    script.run()
    other = copy.deepcopy(script.net)
    if here.rank() == 0:
        optimizer = torch.optim.SGD(other.parameters(), lr=0.01)
        for t in range(FREQUENCY):
            script.backward(t, other.module)
            optimizer.step()
    script.run()


RIGHT = [
    accumulated,
    evaluated_by_process_0,
    steps_left_out,
    closures,
    by_turns,
    copied,
]


def all_right():
    """What each script hears, and one that never calls `perform_slowmo`, which goes on."""
    found = []
    for kind in RIGHT:
        script = Script()
        kind(script)
        found.append(script.run())
    script = Script()
    return found, [script.run(lambda t: 0) for _ in range(2)]


def test_a_script_that_never_calls_it_is_warned_once_and_others_hear_nothing():
    for rank, (others, never) in enumerate(spawned(2, all_right)):
        assert others == [("no error", [])] * len(RIGHT)
        for said, (text,) in never:
            assert said == "no error"
            assert (
                f"not called in {FREQUENCY + 1} steps of the optimizer, so process {rank}" in text
            )
            assert "call it after every optimizer.step()" in text
