"""One torch process that trains the GPT of `text_task` under DistributedDataParallel.

The same model as `jaxslowmo.models`, from the same initial parameters, on the same batches.
"""

import os
import platform
import sys
from datetime import timedelta

import numpy as np
import text_task as task
import torch
import torch.distributed as dist
from host_turns import Variant, serve
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

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
DATA = dict(np.load(sys.argv[5]))
HEADS = int(sys.argv[7])


class GPT(torch.nn.Module):
    """See `jaxslowmo.models.GPT`."""

    def __init__(self) -> None:
        super().__init__()
        arrays = {k.removeprefix("p:"): v for k, v in DATA.items() if k.startswith("p:")}
        self.blocks = len({name.split("/")[1] for name in arrays if name.startswith("blocks/")})
        named = {name: torch.nn.Parameter(torch.from_numpy(v.copy())) for name, v in arrays.items()}
        self.p = torch.nn.ParameterDict(named)

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.p[f"{name}/scale"], self.p[f"{name}/bias"]
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps=1e-6)

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        bias = f"{name}/bias"
        product = x @ self.p[f"{name}/kernel"]
        return product + self.p[bias] if bias in self.p else product

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = F.embedding(tokens, self.p["embed/kernel"]) + self.p["positions"][: tokens.shape[1]]
        batch, time, width = x.shape
        for i in range(self.blocks):
            b = f"blocks/{i}"
            qkv = self.linear(f"{b}/qkv", self.norm(f"{b}/norm_attention", x))
            q, k, v = qkv.reshape(batch, time, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            mixed = mixed.transpose(1, 2).reshape(batch, time, width)
            x = x + self.linear(f"{b}/project", mixed)
            wide = self.linear(f"{b}/expand", self.norm(f"{b}/norm_mlp", x))
            x = x + self.linear(f"{b}/contract", F.gelu(wide, approximate="tanh"))
        return self.linear("head", self.norm("norm", x))


def loss_of(model: torch.nn.Module, windows: np.ndarray) -> torch.Tensor:
    tokens = torch.from_numpy(windows.astype(np.int64))
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def prepare(name: str):
    def build():
        model = DistributedDataParallel(GPT())
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=0.0, betas=task.BETAS, weight_decay=task.WEIGHT_DECAY
        )
        return model, optimizer

    def step(t: int) -> torch.Tensor:
        for group in optimizer.param_groups:
            group["lr"] = task.learning_rate(t)
        optimizer.zero_grad()
        loss = loss_of(model, task.own_batch(DATA["batches"], t, rank, world))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), task.CLIP)
        optimizer.step()
        return loss

    model, optimizer = build()
    for t in range(task.PERIOD // 4):  # DDP rebuilds its buckets in the first steps
        step(t)
    model, optimizer = build()
    done = 0

    def steps(count: int) -> float:
        nonlocal done
        for t in range(done, done + count):
            loss = step(t)
        done += count
        return loss.item()

    def evaluate() -> dict:
        if rank:
            return {}
        with torch.no_grad():
            losses = [loss_of(model.module, batch) for batch in DATA["validation"]]
        return {"validation": float(torch.stack(losses).mean())}

    return Variant(steps, evaluate), evaluate()


serve(prepare, dist.barrier, {"python": platform.python_version(), "torch": torch.__version__})
os._exit(0)
