"""Which steps are measured."""

import pytest

from jaxslowmo.statistics._sampling import Sampling


def sampled(rate, kinds):
    sampling = Sampling(rate)
    return [t for t, kind in enumerate(kinds, 1) if sampling.next(kind)]


def test_the_first_ten_and_then_every_rate_th():
    # torch's DistributedDataParallel samples these with a rate of 7.
    assert sampled(7, ["local"] * 30) == [*range(1, 11), 14, 21, 28]
    assert sampled(1, ["local"] * 15) == list(range(1, 16))
    assert sampled(100, ["local"] * 250) == [*range(1, 11), 100, 200]


def test_seldom_exchanges_are_counted_by_themselves():
    kinds = ["average" if t % 12 == 0 else "local" for t in range(1, 181)]
    # Exchanges 1 to 10, and the 14th at step 168; steps 1 to 10, and every 14th.
    expected = {*range(1, 11), *range(12, 121, 12), *range(14, 181, 14), 168}
    assert sampled(14, kinds) == sorted(expected)


@pytest.mark.parametrize("rate", [0, -3, 2.5, True])
def test_other_rates_are_refused(rate):
    with pytest.raises(ValueError, match=r"`rate` counts steps and must be an int >= 1, got"):
        Sampling(rate)
