"""Scripts that leave out `perform_slowmo`, or call it too often, and those that do neither."""

import copy
import re

import pytest
import slowmo_here as here
import torch
from slowmo_models import Script
from slowmo_spawned import BACKENDS, spawned, spawned_at_once

STEPS, FREQUENCY = 12, 6


def script_of(**options) -> Script:
    return Script(nprocs_per_node=1, slowmo_frequency=FREQUENCY, **options)


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
    return script_of(**options).run(STEPS, calls if here.rank() else lambda t: 1)


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


def apart(script: Script) -> None:
    """What each process may do as it likes: accumulate, evaluate, train something else, and leave
    out a step, as a GradScaler does with infinite gradients."""
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    for t in range(STEPS):
        with script.net.no_sync():
            for k in range(FREQUENCY * 3):
                script.backward(t + k)
        for k in range(FREQUENCY * (1 + here.rank())):
            script.backward(t + k)
        if here.rank() == 0 or t % 4:
            script.optimizer.step()
        for _ in range(FREQUENCY * here.rank() * 2):
            other.step()
        script.net.eval()
        if here.rank() == 0:
            script.backward(t)
        script.net.train()
        script.net.zero_grad()
        script.net.perform_slowmo(script.optimizer)


def copied(script: Script) -> None:
    """A copy that is trained by process 0 alone, which does not exchange."""
    script.run(STEPS)
    other = copy.deepcopy(script.net)
    if here.rank() == 0:
        optimizer = torch.optim.SGD(other.parameters(), lr=0.01)
        for t in range(FREQUENCY):
            script.backward(t, other.module)
            optimizer.step()
    script.run(STEPS)


def all_right():
    """What each script hears, and one that never calls `perform_slowmo`, which goes on."""
    found = []
    for kind in (apart, copied):
        script = script_of()
        kind(script)
        found.append(script.run(STEPS))
    script = script_of()
    return found, [script.run(STEPS, lambda t: 0) for _ in range(2)]


def test_a_script_that_never_calls_it_is_warned_once_and_others_hear_nothing():
    for rank, (others, never) in enumerate(spawned(2, all_right)):
        assert others == [("no error", [])] * 2
        for said, (text,) in never:
            assert said == "no error"
            assert (
                f"not called in {FREQUENCY + 1} steps of the optimizer, so process {rank}" in text
            )
            assert "call it after every optimizer.step()" in text
