"""What the constructor refuses, warns of, and sets; it needs no device."""

import dataclasses
import inspect
import logging
import warnings

import pytest
import torch

from torch_compat.slowmo import SlowMoBaseAlgorithm, SlowMoDistributedDataParallel
from torch_compat.slowmo._options import Options

ARGUMENTS = [
    "module",
    "nprocs_per_node",
    "broadcast_buffers",
    "slowmo_base_algorithm",
    "slowmo_momentum",
    "slowmo_memory_efficient",
    "slowmo_frequency",
    "slowmo_lr",
    "slowmo_num_shards",
    "localsgd_frequency",
    "graph",
    "mixing",
    "push_sum",
    "overlap",
    "synch_freq",
    "use_streams",
    "slowmo_sgp_average_params",
    "verbose",
    "profile_mode",
    "process_rank",
    "process_world_size",
    "global_group",
    "master_group",
    "local_node_group",
    "comm_device",
]
OURS = {
    "broadcast_parameters": False,
    "check_start": True,
    "backend": None,
    "bound_momentum": True,
}
DEFAULTS = [True, SlowMoBaseAlgorithm.LOCALSGD, 0.5, True, 48, 1.0, 32, 3, None, None, True, False]
DEFAULTS += [0, True, False, False, False, None, None, None, None, None, None]


def test_arguments_order_and_defaults_are_fairscales():
    parameters = list(inspect.signature(SlowMoDistributedDataParallel).parameters.values())
    parameters, ours = parameters[: -len(OURS)], parameters[-len(OURS) :]
    assert [p.name for p in parameters] == ARGUMENTS
    assert [p.default for p in parameters[2:]] == DEFAULTS
    assert {p.name: p.default for p in ours} == OURS
    assert {p.kind for p in ours} == {inspect.Parameter.KEYWORD_ONLY}
    assert [p.default for p in parameters[:2]] == [inspect.Parameter.empty] * 2


def test_options_have_the_constructors_defaults():
    parameters = inspect.signature(SlowMoDistributedDataParallel).parameters
    for field in dataclasses.fields(Options):
        if field.default is not dataclasses.MISSING:
            assert parameters[field.name].default is field.default, field.name


def test_attributes_that_fairscales_users_read(build):
    net = build(world=8, rank=5, nprocs_per_node=2, slowmo_lr=0.7, slowmo_momentum=0.2)
    assert (net.process_rank, net.process_world_size, net.nprocs_per_node) == (5, 8, 2)
    assert (net.logical_rank, net.logical_world_size) == (2, 4)
    assert (net.slowmo_lr, net.slowmo_momentum, net.slowmo_frequency) == (0.7, 0.2, 48)
    assert (net.localsgd_frequency, net.num_updates) == (3, 0)
    assert net.ps_weight.tolist() == [1.0]
    assert net.old_params is None
    assert net.global_momentum_buffer is None
    assert isinstance(net.module, torch.nn.Linear)


def test_base_algorithm_by_member_or_string(build):
    assert SlowMoBaseAlgorithm.SGP == "sgp"
    for value in (SlowMoBaseAlgorithm.SGP, "sgp"):
        net = build(slowmo_base_algorithm=value)
        assert net.sgp
        assert not net.localsgd


def test_slow_momentum_is_off_where_it_would_do_nothing(build):
    assert not build(slowmo_momentum=0.0, slowmo_lr=1.0).slowmo
    assert build(slowmo_momentum=0.0, slowmo_lr=0.9).slowmo


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slowmo_frequency": 0}, r"`slowmo_frequency` must be an int >= 1, got 0"),
        ({"localsgd_frequency": 2.5}, r"`localsgd_frequency` must be an int >= 1, got 2.5"),
        ({"slowmo_num_shards": 0}, r"`slowmo_num_shards` must be an int >= 1, got 0"),
        ({"slowmo_momentum": 1.0}, r"`slowmo_momentum` must lie in \[0, 1\), got 1.0"),
        ({"slowmo_momentum": float("nan")}, r"`slowmo_momentum` must lie in \[0, 1\), got nan"),
        ({"slowmo_lr": -1}, r"`slowmo_lr` must be a finite number >= 0, got -1"),
        ({"nprocs_per_node": 0}, r"`nprocs_per_node` must be an int >= 1, got 0"),
        ({"nprocs_per_node": 3}, r"`nprocs_per_node` must divide .* processes, 4, got 3"),
        ({"slowmo_base_algorithm": "adpsgd"}, r"one of 'localsgd', 'sgp', got 'adpsgd'"),
        ({"overlap": True}, r"`overlap`=True is not available .* jaxslowmo\.sgp"),
        ({"process_rank": 0}, r"`process_rank` comes from torch_xla, where it is 1.* got 0"),
        ({"process_world_size": 8}, r"`process_world_size` comes from torch_xla.* is 4.* got 8"),
        (
            {"broadcast_buffers": "mean"},
            r"`broadcast_buffers` must be True, .*\"average\", got 'mean'",
        ),
        ({"broadcast_buffers": 1}, 'True, False or "average", got 1'),
        (
            {
                "broadcast_buffers": "average",
                "slowmo_base_algorithm": "sgp",
                "slowmo_momentum": 0.0,
            },
            r"`broadcast_buffers`=\"average\" .* SGP without slow momentum .* has neither",
        ),
        ({"module": "linear"}, r"`module` must be a torch.nn.Module with parameters, got 'linear'"),
        ({"module": torch.nn.ReLU()}, r"`module` must be .* with parameters, got ReLU"),
    ],
)
def test_refused(build, options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


def test_one_warning_names_all_arguments_without_effect(build):
    with pytest.warns(UserWarning, match="without effect over torch_xla") as caught:
        build(
            synch_freq=2,
            use_streams=False,
            profile_mode=True,
            comm_device=torch.device("cpu"),
            global_group=object(),
            slowmo_num_shards=2,
        )
    assert len(caught) == 1
    message = str(caught[0].message)
    for name in ["synch_freq", "use_streams", "profile_mode", "comm_device", "global_group"]:
        assert f"`{name}`" in message
    assert "`slowmo_num_shards`" in message
    assert "local_node_group" not in message


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"slowmo_num_shards": 4},
        {"world": 64},
        {"slowmo_num_shards": 1, "slowmo_memory_efficient": False},
        {"process_rank": 1, "process_world_size": 4},
    ],
)
def test_no_warning_where_all_is_well(build, options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(**options)


def test_one_node_needs_no_base_algorithm(build):
    with pytest.warns(UserWarning, match="SGP") as caught:
        net = build(nprocs_per_node=4, slowmo_base_algorithm="sgp")
    assert not net.sgp
    assert not net.localsgd
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == 2
    assert "LocalSGD and SGP are off" in messages[0]
    assert messages[1] == "SlowMo is used without LocalSGD and SGP."


def test_frequencies_out_of_step(build):
    with pytest.warns(UserWarning, match="`slowmo_frequency`=4 is not a multiple"):
        build(slowmo_frequency=4)


def test_a_single_process(build):
    with pytest.warns(UserWarning, match="there is one process"):
        build(world=1, rank=0)


def test_verbose_can_be_read(build, caplog):
    """In a program that has set up no logging, and by the logging of one that has."""
    logger = logging.getLogger("torch_compat.slowmo")
    others = logging.root.handlers[:]
    try:
        logging.root.handlers[:] = []
        build(verbose=True)
        build(verbose=True)
        assert len(logger.handlers) == 1
        assert logger.isEnabledFor(logging.DEBUG)
        logger.handlers[:] = []
        logging.root.handlers[:] = others
        build(verbose=True)
        assert logger.handlers == []
    finally:
        logging.root.handlers[:] = others
        logger.handlers[:] = []
        logger.setLevel(logging.NOTSET)
