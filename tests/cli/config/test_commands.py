"""Configurations of a comparison: algorithms that bring settings."""

import pytest

from jaxslowmo.cli.config._commands import CompareConfig
from jaxslowmo.cli.config._training import train_config


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("sgp", {}),
        ("sgp+overlap=1", {"overlap": 1}),
        ("sgp+peers-per-step=2+graph=ring", {"peers_per_step": 2, "graph": "ring"}),
        ("slowmo+slow_momentum=0.1+nesterov=true", {"slow_momentum": 0.1, "nesterov": True}),
        ("sgp+mixing=self_weighted:0.7", {"mixing": "self_weighted:0.7"}),
    ],
)
def test_algorithms_of_a_comparison_bring_settings(algorithm, expected):
    config = CompareConfig(train_config({}), algorithms=("all_reduce", algorithm), seeds=(0,))
    chosen = config.run(algorithm, 0).algorithm
    assert chosen.algorithm == algorithm.partition("+")[0]
    assert {name: getattr(chosen, name) for name in expected} == expected
    assert config.run("all_reduce", 0).algorithm.overlap == 0
