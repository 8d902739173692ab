"""One torch process of the reducer benchmark: DistributedDataParallel on gloo.

The model's loss is the sum of <c_i, p_i> over its leaves, so that a leaf's gradient is one
multiplication: the backward pass makes the gradients, last leaf first, and nothing else. Timed is
`loss.backward()`, which in DDP returns when all buckets are reduced and copied back.
"""

import os
import platform
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from shapes import gradients, relative_error, shapes_of
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from turns import Timed, serve

port, rank, world, model = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
torch.set_num_threads(1)
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
dist.init_process_group(
    "gloo",
    init_method=f"tcp://127.0.0.1:{port}",
    rank=rank,
    world_size=world,
    timeout=timedelta(seconds=120),
)
CONSTANTS = [torch.from_numpy(g).reshape(-1) for g in gradients(model, rank)]


class Leaves(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.leaves = torch.nn.ParameterList(
            # Scalars as vectors of one element: the stock PowerSGD hook fails on scalars.
            [torch.nn.Parameter(torch.zeros(s or (1,))) for s in shapes_of(model)]
        )

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        loss = torch.zeros(())
        # A chain, so that the backward pass meets the leaves one by one, last first.
        for constant, leaf in zip(CONSTANTS, self.leaves, strict=True):
            loss = loss + torch.dot(leaf.view(-1), constant)
        return loss * scale


def bf16(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    # The stock hook is refused on CPU by its name; under another name it runs.
    return default_hooks.bf16_compress_hook(state, bucket)


def ddp(name: str) -> DistributedDataParallel:
    kind, *arguments = name.split()
    options = {"bucket_cap_mb": float(arguments[0])} if kind == "cap" else {}
    if kind == "view":
        options = {"gradient_as_bucket_view": True}
    if kind == "powersgd":
        # One bucket: with two this hook hung in one of two runs here, for a reason not found.
        options = {"bucket_cap_mb": 1000}
    made = DistributedDataParallel(Leaves(), **options)
    if kind == "fp16":
        made.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if kind == "bf16":
        made.register_comm_hook(None, bf16)
    if kind == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=int(arguments[0]), start_powerSGD_iter=2
        )
        made.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return made


def prepare(name: str):
    module = ddp(name) if name not in ("no_sync", "per leaf") else Leaves()
    parameters = list(module.parameters())
    scale = torch.ones(())

    def step(timed: Timed) -> None:
        for p in parameters:
            p.grad = None
        loss = module(scale)
        with timed:
            loss.backward()
            if name == "per leaf":
                for p in parameters:
                    dist.all_reduce(p.grad)
                    p.grad /= world

    # 4 steps: DDP rebuilds its buckets after the first, PowerSGD starts at the second.
    for _ in range(4):
        step(Timed())
    error = relative_error([p.grad.numpy() for p in parameters], model, world)
    buckets = []
    if isinstance(module, DistributedDataParallel):
        data = module._get_ddp_logging_data()
        sizes = data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
        buckets = [int(size) for size in sizes.split(",")]
    return step, {"error": error, "buckets": buckets}


serve(prepare, {"python": platform.python_version(), "torch": torch.__version__})
# Whoever leaves first makes the others fail: all wait until the driver has seen every answer.
os._exit(0)
