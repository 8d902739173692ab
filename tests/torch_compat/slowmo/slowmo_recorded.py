"""Recorded runs of FairScale's SlowMoDistributedDataParallel, and the same run on XLA devices."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import slowmo_here as here
import torch

from jaxslowmo import topology
from torch_compat.slowmo import SlowMoDistributedDataParallel as SlowMo

FOLDER = Path(__file__).parents[3] / "tests" / "golden" / "fairscale"
HERE = Path(__file__).parent / "recorded"
GRAPHS = {
    "NPeerDynamicDirectedExponentialGraph": "npeer_directed_exponential",
    "DynamicDirectedExponentialGraph": "directed_exponential",
    "DynamicDirectedLinearGraph": "directed_linear",
    "DynamicBipartiteExponentialGraph": "bipartite_exponential",
    "DynamicBipartiteLinearGraph": "bipartite_linear",
    "RingGraph": "ring",
}


@dataclass
class Recording:
    """One file."""

    config: dict[str, Any]
    arrays: dict[str, np.ndarray]

    @classmethod
    @functools.cache
    def load(cls, name: str) -> "Recording":
        """Read once, by the parent: CPython 3.11 cannot parse the files' headers in two threads
        at a time (SystemError: AST constructor recursion depth mismatch), and devices are threads.
        """
        folder = next(f for f in (FOLDER, HERE) if (f / f"{name}.npz").exists())
        with np.load(folder / f"{name}.npz") as file:
            arrays = {key: file[key] for key in file.files}
        return cls(json.loads(str(arrays.pop("config"))), arrays)

    def of(self, prefix: str) -> list[np.ndarray]:
        return [self.arrays[f"{prefix}_{i}"] for i in range(len(self.config["shapes"]))]

    @property
    def is_half(self) -> bool:
        return self.config.get("dtype") == "float16"

    @property
    def takes_anchor_late(self) -> bool:
        """FairScale's default: the anchor is what the first inner step leaves on each process."""
        return self.config["effective"]["slowmo"] and not self.config.get("explicit_init")

    def graph(self) -> topology.Graph | None:
        name = self.config["graph"]
        if name is None:
            return None
        peers = self.config["peers_per_itr"]
        if name == "table":
            return topology.from_phone_book(self.config["table"], peers)
        nodes = self.config["world"] // self.config["constructor_args"]["nprocs_per_node"]
        return topology.make_graph(GRAPHS[name], nodes, peers_per_step=peers)


def names(world: int) -> list[str]:
    """The files of this number of processes."""
    found = sorted(path.stem for folder in (FOLDER, HERE) for path in folder.glob("*.npz"))
    return [name for name in found if Recording.load(name).config["world"] == world]


class Prescribed(torch.nn.Module):
    """Parameters whose gradients are what is passed in."""

    def __init__(self, values: list[np.ndarray], buffers: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.values = torch.nn.ParameterList([torch.tensor(v, dtype=dtype) for v in values])
        if buffers is not None:
            self.register_buffer("buffer", torch.tensor(buffers, dtype=torch.float32))

    def forward(self, grads: list[torch.Tensor]) -> dict[str, Any]:
        seen = {f"forward_params_{i}": p.detach() * 1 for i, p in enumerate(self.values)}
        if hasattr(self, "buffer"):
            seen["buffer_seen"] = self.buffer * 1
        loss = sum((p * g).sum() for p, g in zip(self.values, grads, strict=True))
        return {"loss": loss, "seen": seen}


def replay(name: str) -> dict[str, np.ndarray]:
    """The recorded run on this device: `params_i`, `ps_weight` and so on, `[steps, ...]`."""
    recording = Recording.load(name)
    config, args = recording.config, recording.config["constructor_args"]
    device, rank = here.device(), here.rank()
    dtype = torch.float16 if recording.is_half else torch.float32
    per_rank = config.get("init_per_rank")
    values = [v[rank] if per_rank else v for v in recording.of("init")]
    module = Prescribed(values, config.get("buffers"), dtype).to(device)
    kept = config.get("mixing_lo")
    net = SlowMo(
        module,
        graph=recording.graph(),
        mixing=None if kept is None else topology.self_weighted(kept),
        init_sync=not per_rank,
        **args,
    )
    master = None
    if recording.is_half:
        flat = torch.cat([p.detach().float().reshape(-1) for p in module.values])
        master = torch.nn.Parameter(flat)
    optimizer = _optimizer(config, list(module.values) if master is None else [master])
    history: dict[str, list[np.ndarray]] = {}
    for t in range(config["steps"]):
        for group, scale in zip(
            optimizer.param_groups, config["parameter_group_lr_scale"], strict=True
        ):
            group["lr"] = config["lr_per_step"][t] * scale
        if "buffers" in config:
            module.buffer += (rank + 1) * (t + 1)
        net.train(t not in config.get("eval_at", ()))
        grads = [torch.tensor(g[t, rank], dtype=dtype).to(device) for g in recording.of("grads")]
        out = net(grads)
        out["loss"].backward()
        if master is not None:
            master.grad = torch.cat([p.grad.float().reshape(-1) for p in module.values])
        optimizer.step()
        if master is not None:
            _copy_master(master, list(module.values))
        net.zero_grad(set_to_none=True)
        optimizer.zero_grad(set_to_none=True)
        if t == 0 and recording.takes_anchor_late:
            net._init_global_momentum_buffers(optimizer)
        net.perform_slowmo(optimizer, fp32_params=master, others="fairscale")
        here.launch()
        record = {f"params_{i}": p for i, p in enumerate(module.values)}
        record |= out["seen"]
        record["ps_weight"] = net.ps_weight.sum()
        if master is not None:
            record["fp32_flat"] = master
        here.launch()
        for key, value in record.items():
            history.setdefault(key, []).append(value.detach().cpu().numpy().copy())
    return {key: np.stack(values) for key, values in history.items()}


def replay_all(names: list[str]) -> dict[str, dict[str, np.ndarray]]:
    return {name: replay(name) for name in names}


def _copy_master(master: torch.Tensor, params: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for p, part in zip(params, master.split([p.numel() for p in params]), strict=True):
            p.copy_(part.reshape(p.shape))


def _optimizer(config: dict[str, Any], params: list[torch.Tensor]) -> torch.optim.Optimizer:
    spec = config["optimizer"]
    groups = [{"params": params}]
    if len(params) == len(config["shapes"]):
        groups = [{"params": [params[i] for i in ids]} for ids in config["parameter_groups"]]
    if spec["name"] == "adam":
        return torch.optim.Adam(groups, lr=spec["lr"])
    return torch.optim.SGD(groups, lr=spec["lr"], momentum=spec.get("momentum", 0.0))
