"""One torch process of the cluster benchmark: torch's own, FairScale, torchft, `torch_compat`."""

import os
import platform
import socket
import sys
from datetime import timedelta

import task
import torch
import torch.distributed as dist
from host_turns import Variant, serve
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from torch_compat import SlowMoDistributedDataParallel

address, port, rank, world = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(1)
os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
dist.init_process_group(
    "gloo",
    init_method=f"tcp://{address}:{port}",
    rank=rank,
    world_size=world,
    timeout=timedelta(seconds=120),
)
ALONE, _ = dist.new_subgroups(group_size=1)
X, Y = map(torch.from_numpy, task.batch(rank))


def build() -> torch.nn.Module:
    layers: list[torch.nn.Module] = []
    for matrix, bias in task.parameters():
        layer = torch.nn.Linear(task.WIDTH, task.WIDTH)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(matrix.T.copy()))
            layer.bias.copy_(torch.from_numpy(bias))
        layers += [layer, torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def fairscale(model: torch.nn.Module) -> torch.nn.Module:
    """FairScale's SlowMo over LocalSGD with these periods, its state sharded over the hosts."""
    # It calls this without asking whether there is a GPU; there is nothing to wait for.
    torch.cuda.synchronize = lambda device=None: None
    try:
        from fairscale.experimental.nn.data_parallel import (
            SlowMoBaseAlgorithm,
            SlowMoDistributedDataParallel,
        )
    except ImportError as error:
        raise ValueError(
            "not installed: .venv-bench/bin/python -m pip install --no-deps --no-build-isolation "
            f"fairscale==0.4.13 ({error})"
        ) from None
    return SlowMoDistributedDataParallel(
        model,
        nprocs_per_node=1,
        slowmo_base_algorithm=SlowMoBaseAlgorithm.LOCALSGD,
        localsgd_frequency=12,
        slowmo_frequency=48,
        slowmo_momentum=0.5,
    )


# Fragments, delay, and the port of the lighthouse, which knows the replicas of one variant.
TORCHFT = {
    "torchft DiLoCo(48)": (1, 0, 9821),
    "torchft DiLoCo(48, delay=40)": (1, 40, 9822),
    "torchft DiLoCo(48, fragments=4, delay=8)": (4, 8, 9823),
}


KEPT: list = []  # what would end if nobody referred to it


def torchft(model: torch.nn.Sequential, optimizer: torch.optim.Optimizer, name: str) -> None:
    """Let torchft synchronise the model in the optimizer's hooks, each host a replica."""
    try:
        import torchft as ft
        from torchft.coordination import LighthouseServer
        from torchft.local_sgd import DiLoCo
    except ImportError as error:
        raise ValueError(
            f"not installed: .venv-bench/bin/python -m pip install torchft==0.2.0 ({error})"
        ) from None
    count, delay, port = TORCHFT[name]
    if rank == 0:
        KEPT.append(LighthouseServer(bind=f"0.0.0.0:{port}", min_replicas=world))
    dist.barrier()
    own = socket.gethostbyname(socket.gethostname())
    store = dist.TCPStore(own, 0, is_master=True, wait_for_workers=False)
    manager = ft.Manager(
        pg=ft.ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=world,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr=own,
        store_port=store.port,
        lighthouse_addr=f"http://{address}:{port}",
        replica_id=f"host{rank}",
        hostname=own,
        init_sync=False,
    )
    layers = [layer for layer in model if isinstance(layer, torch.nn.Linear)]
    first = len(layers) - count + 1
    fragments = [torch.nn.Sequential(*layers[:first])]
    fragments += [torch.nn.Sequential(layer) for layer in layers[first:]]
    outer = [
        torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        for part in fragments
    ]
    # One all-reduce per fragment: with one per parameter it is slower. `should_quantize=True`, FP8,
    # needs a GPU: torchft 0.2.0 sends float32 without Triton, and says nothing (manager.py, line
    # 458), and asks for the stream of an accelerator with it (line 463; collectives.py, line 364).
    diloco = DiLoCo(
        manager,
        fragments,
        optimizer,
        outer,
        sync_every=48,
        fragment_sync_delay=delay,
        use_bucketization=True,
    )
    KEPT.append((store, diloco.__enter__()))


OURS = {
    "torch_compat LocalSGD(12)": {"localsgd_frequency": 12, "slowmo_momentum": 0.0},
    "torch_compat SlowMo(12, 48)": {"localsgd_frequency": 12, "slowmo_frequency": 48},
    "torch_compat SlowMo(48)": {"localsgd_frequency": 48, "slowmo_frequency": 48},
    "torch_compat SGP": {"slowmo_base_algorithm": "sgp", "slowmo_momentum": 0.0},
}


def prepare(name: str):
    model: torch.nn.Module = build()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        model.parameters(), lr=task.LEARNING_RATE, momentum=task.MOMENTUM
    )
    if name == "DDP":
        model = DistributedDataParallel(model)
    elif name.startswith("FairScale"):
        model = fairscale(model)
    elif name in TORCHFT:
        torchft(model, optimizer, name)
    elif name in OURS:
        model = SlowMoDistributedDataParallel(model, nprocs_per_node=1, **OURS[name])
    elif name.startswith("PostLocalSGD"):
        # Gradients are averaged inside subgroups, here of one host each; parameters over all.
        period = int(name.partition("(")[2].rstrip(")"))
        model = DistributedDataParallel(model)
        state = post.PostLocalSGDState(process_group=None, subgroup=ALONE, start_localSGD_iter=0)
        model.register_comm_hook(state, post.post_localSGD_hook)
        averager = PeriodicModelAverager(period=period, warmup_steps=0)
        optimizer = PostLocalSGDOptimizer(optim=optimizer, averager=averager)

    def steps(count: int) -> float:
        for _ in range(count):
            optimizer.zero_grad()
            loss = ((model(X) - Y) ** 2).mean()
            loss.backward()
            optimizer.step()
            if name.startswith("FairScale") or name in OURS:
                model.perform_slowmo(optimizer)
        return loss.item()

    first = steps(1)
    steps(task.TORCH[name] - 1)
    return Variant(steps), {"first_loss": first}


serve(prepare, dist.barrier, {"python": platform.python_version(), "torch": torch.__version__})
os._exit(0)
