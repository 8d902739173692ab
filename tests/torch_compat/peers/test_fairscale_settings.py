"""What FairScale's own tests assert of its class, of ours over both backends."""

import functools

import numpy as np
import pytest
from fairscale_runs import run_all
from fairscale_settings import CLOSE, INEXACT_WITH_FOUR, SETTINGS, Setting
from slowmo_spawned import spawned

WORLDS = (2, 4)
EXACT_WITH = {4: SETTINGS.keys() - INEXACT_WITH_FOUR.keys(), 2: SETTINGS.keys()}


@functools.cache
def runs(by: str, world: int):
    """All settings in one start of the processes."""
    return spawned(world, run_all, by=by)


def params(by: str, world: int, name: str) -> np.ndarray:
    return np.stack([rank[name]["params"] for rank in runs(by, world)], axis=1)


def tolerance(by: str, setting: Setting) -> dict[str, float]:
    """FairScale's; but what it compares with ran on the same device, and ours not on XLA's."""
    return setting.tolerance if by == "gloo" else CLOSE


@pytest.mark.parametrize(
    ("world", "name"), [(world, name) for world in WORLDS for name in sorted(EXACT_WITH[world])]
)
def test_processes_together_do_what_is_expected_of_them(by, world, name):
    setting = SETTINGS[name]
    expected = setting.expected(setting, world)
    np.testing.assert_allclose(params(by, world, name), expected, **tolerance(by, setting))
    assert np.ptp(expected, axis=0).max() > 1e-3, "nothing was trained"


@pytest.mark.parametrize("name", INEXACT_WITH_FOUR)
def test_four_processes_that_do_not_average_exactly(by, name):
    """FairScale's comparison does not hold for it either; it runs these settings with two alone."""
    setting, ours = SETTINGS[name], params(by, 4, name)
    assert np.abs(ours - setting.expected(setting, 4)).max() > 1e-4
    np.testing.assert_allclose(ours, INEXACT_WITH_FOUR[name](setting, 4), **tolerance(by, setting))


@pytest.mark.parametrize("world", WORLDS)
def test_sharded_slow_steps_end_equal_also_after_gossip(by, world):
    ours = params(by, world, "SGP")
    for slow_step in (1, 3, 5):
        assert (ours[slow_step] == ours[slow_step, :1]).all()
    spread = np.ptp(ours[::2], axis=1).max(-1)
    assert (spread == 0).all() if world == 2 else (spread > 1e-4).all()


@pytest.mark.parametrize("world", WORLDS)
def test_slow_momentum_is_on_where_it_does_something(by, world):
    for name, setting in SETTINGS.items():
        assert [rank[name]["slowmo"] for rank in runs(by, world)] == [setting.momentum > 0] * world
