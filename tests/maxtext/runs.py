"""Runs of MaxText's trainers, its own and that of examples/maxtext, and their losses."""

import os
import sys
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parents[2] / "examples/maxtext"))

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
from maxtext.common.metric_logger import MetricLogger
from maxtext.input_pipeline import input_pipeline_interface

from jaxslowmo.train import _with_exchange

CONFIG = Path(__file__).parents[2] / "examples/maxtext/tiny.yml"
RECORDED = Path(__file__).parents[1] / "golden/maxtext/losses.json"

MODELS = {
    "fsdp": {},
    "data x fsdp": {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2},
    "tensor x fsdp": {"ici_tensor_parallelism": 2, "ici_fsdp_parallelism": 2},
    "dropout": {"enable_dropout": True, "dropout_rate": 0.2},
    "sparse MoE": {
        "decoder_block": "mixtral",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "base_moe_mlp_dim": 64,
        "megablox": False,  # its kernel is interpreted on a CPU
    },
    "skip_step_on_spikes": {
        "skip_step_on_spikes": True,
        "skip_step_interval": 4,
        "skip_step_scaling_factor": 0.01,
        "gradient_clipping_threshold": 0,  # else all norms are 1, and rounding decides
    },
}
EXCHANGES = {
    "DiLoCo": {"diloco_sync_period": 3, "steps": 10, "learning_rate": 0.01},
    "Streaming DiLoCo": {
        "diloco_sync_period": 6,
        "num_diloco_fragments": 3,
        "num_communication_overlapping_steps": 1,
        "communication_overlapping_alpha": 0.5,
        "steps": 16,
        "learning_rate": 0.01,
    },
}
ITS_OWN = {
    "DiLoCo": {"enable_diloco": True},
    "Streaming DiLoCo": {"enable_diloco": True, "enable_streaming_diloco": True},
}


def batches(config: Any, seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield another batch of random tokens for each update."""
    rng = np.random.default_rng(seed)
    shape = config.global_batch_size_to_load, config.max_target_length
    places, ones = (
        np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
        np.ones(shape, np.int32),
    )
    while True:
        tokens = rng.integers(1, config.vocab_size, (shape[0], shape[1] + 1), np.int32)
        batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
        batch |= {f"{name}_position": places.copy() for name in ("inputs", "targets")}
        yield batch | {f"{name}_segmentation": ones.copy() for name in ("inputs", "targets")}


class Tests:
    """The batches of the training again, for evaluation; `reset` goes back to the first."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.reset()

    def reset(self) -> None:
        self.batches = batches(self.config, 0)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self.batches


@contextlib.contextmanager
def equal_keys() -> Iterator[None]:
    """Drop the same units on all replicas, as MaxText's own DiLoCo does."""
    with mock.patch.object(_with_exchange, "with_own_keys", lambda name, stacked, **_: stacked):
        yield


@contextlib.contextmanager
def other_batches() -> Iterator[None]:
    """Train on other batches in every update, where MaxText's synthetic data are always equal."""

    def create(config: Any, mesh: Any) -> tuple[Any, Any]:
        tests = Tests(config) if config.eval_interval > 0 else None
        return batches(config, 0), tests

    with mock.patch.object(input_pipeline_interface, "create_data_iterator", create):
        yield


def run(main: Callable[[list[str]], Any], **options: Any) -> list[dict[str, float]]:
    """Return what a trainer reports of each update."""
    reports: list[dict[str, float]] = []
    write = MetricLogger.write_metrics

    def keep(self: Any, metrics: Any, step: int, metric_type: str = "train") -> None:
        reports.append({name: float(x) for name, x in metrics["scalar"].items()} | {"step": step})
        write(self, metrics, step, metric_type)

    arguments = [f"{name}={value}" for name, value in options.items()]
    with mock.patch.object(MetricLogger, "write_metrics", keep):
        main(["train.py", str(CONFIG), *arguments])
    return reports


def losses(reports: list[dict[str, float]]) -> np.ndarray:
    """Return the mean loss of the replicas in each update, before it."""
    name = "learning/loss"
    found = [
        [r[n] for n in sorted(r) if n.startswith(f"{name}_island")] or [r[name]]
        for r in reports
        if name in r
    ]
    return np.mean(found, axis=1)
