"""Runs of the authors' code of DeMo, SPARTA and NoLoCo, which write `peers/*.npz`.

    python tests/golden/record_peers.py CHECKOUTS

needs torch, einops and numpy, and checkouts of github.com/bloc97/DeMo (commit 0e48145),
exo-explore/gym (9fa323c) and gensyn-ai/noloco (a1b4a42) in the folders `DeMo`, `gym` and `noloco`.
Every rank is a process, over gloo. There is no model: the gradients of every step and rank are
prescribed. Nothing of the code is replaced; packages whose `__init__` imports what is not needed
here, such as wandb, are entered without it.
"""

import json
import multiprocessing
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist

FOLDER = Path(__file__).with_name("peers")
SHAPES = [[8, 12], [30], [7]]
STEPS = 9


def model_of(arrays: dict) -> torch.nn.Module:
    model = torch.nn.Module()
    for i in range(len(SHAPES)):
        model.register_parameter(f"p{i}", torch.nn.Parameter(torch.tensor(arrays[f"p{i}/init"])))
    return model


def steps_of(rank: int, model: torch.nn.Module, arrays: dict, step, zero_grad) -> list[dict]:
    """Make all steps; return the parameters after each."""
    found = []
    for t in range(STEPS):
        zero_grad()
        for i, p in enumerate(model.parameters()):
            p.grad = torch.tensor(arrays[f"p{i}/G"][rank, t])
        more = step(t) or {}
        params = {
            f"p{i}/param": p.detach().numpy().copy() for i, p in enumerate(model.parameters())
        }
        found.append(params | more)
    return found


def demo(rank: int, meta: dict, arrays: dict, checkouts: Path) -> list[dict]:
    model = model_of(arrays)
    if meta["code"] == "gym":
        from exogym.strategy.demo import DeMoStrategy

        strategy = DeMoStrategy(
            compression_decay=meta["decay"],
            compression_topk=meta["top_k"],
            compression_chunk=meta["chunk"],
            weight_decay=meta["weight_decay"],
            strategy_config=SimpleNamespace(optimizer_kwargs={"lr": meta["lr"][0]}),
        )
        strategy._init_node(model, rank, meta["world"])
        optimizer, update = strategy.optim, strategy.step
    else:
        sys.path.insert(0, str(checkouts / "DeMo"))
        from demo import DeMo

        optimizer = DeMo(
            model.parameters(),
            lr=meta["lr"][0],
            compression_decay=meta["decay"],
            compression_topk=meta["top_k"],
            compression_chunk=meta["chunk"],
            weight_decay=meta["weight_decay"],
        )
        update = optimizer.step
    decoded, decode = [], optimizer.transform.decode

    def noting(x):
        decoded.append(decode(x))
        return decoded[-1].clone()

    optimizer.transform.decode = noting

    def step(t: int) -> dict:
        optimizer.param_groups[0]["lr"] = meta["lr"][t]
        decoded.clear()
        update()
        states = [optimizer.demo_state[p]["delta"] for p in model.parameters()]
        # For every parameter what this rank sent, then what all sent.
        of_all = decoded[1::2]
        return {f"p{i}/delta": x.numpy().copy() for i, x in enumerate(states)} | {
            f"p{i}/decoded": x.numpy().copy() for i, x in enumerate(of_all)
        }

    return steps_of(rank, model, arrays, step, optimizer.zero_grad)


def sparta(rank: int, meta: dict, arrays: dict, checkouts: Path) -> list[dict]:
    from exogym.strategy import sparta as code
    from exogym.strategy.communicate_optimize_strategy import CommunicateOptimizeStrategy
    from exogym.strategy.optim import OptimSpec

    optimizer = OptimSpec(getattr(torch.optim, meta["optimizer"]), lr=meta["lr"])
    if meta["selector"] == "RandomIndexSelector":
        strategy = code.SPARTAStrategy(optimizer, p_sparta=meta["p"])
        selector = strategy.index_selector
    else:
        selector = getattr(code, meta["selector"])(meta["p"])
        strategy = CommunicateOptimizeStrategy([code.SparseCommunicator(selector)], optimizer)
    model, masks, get_indices = model_of(arrays), [], selector.get_indices

    def noting(param, iteration):
        masks.append(get_indices(param, iteration))
        return masks[-1]  # into which that of rank 0 is then received

    selector.get_indices = noting
    strategy._init_node(model, rank, meta["world"])
    torch.manual_seed(meta["seed"] + rank)

    def step(t: int) -> dict:
        del t
        masks.clear()
        strategy.step()
        return {f"p{i}/mask": x.numpy().copy() for i, x in enumerate(masks)}

    return steps_of(rank, model, arrays, step, strategy.zero_grad)


def noloco(rank: int, meta: dict, arrays: dict, checkouts: Path) -> list[dict]:
    from noloco import sparse_optimizer_c as code

    model, groups, outer_step = model_of(arrays), [], code.outer_step

    def noting(group, *args):
        groups.append(sorted(group))
        outer_step(group, *args)

    code.outer_step = noting
    optimizer = code.SparseOptimizerC(
        model,
        dist.group.WORLD,
        meta["group_size"],
        meta["local_steps"],
        meta["outer_lr"],
        meta["outer_momentum"],
        lr=meta["lr"],
    )

    def step(t: int) -> dict:
        optimizer.step()
        due = (t + 1) % meta["local_steps"] == 0
        found = {"group": np.array(groups[-1] if due else [-1] * meta["group_size"], np.int32)}
        for i, (old, m) in enumerate(zip(optimizer.step_params, optimizer.momentum, strict=True)):
            found |= {f"p{i}/outer": old.numpy().copy(), f"p{i}/momentum": m.numpy().copy()}
        return found

    return steps_of(rank, model, arrays, step, optimizer.zero_grad)


def enter(name: str, folder: Path) -> None:
    """Make a package of a folder, without running its `__init__`."""
    package = ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package


def of_rank(rank: int, kind: str, meta: dict, arrays: dict, store: str, checkouts: Path):
    torch.set_num_threads(1)
    enter("exogym", checkouts / "gym/exogym")
    enter("exogym.aux", checkouts / "gym/exogym/aux")
    enter("noloco", checkouts / "noloco/src/noloco")
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=meta["world"])
    found = RUNS[kind](rank, meta, arrays, checkouts)
    dist.barrier()
    dist.destroy_process_group()
    return found


def recorded(kind: str, number: int, meta: dict, checkouts: Path) -> dict:
    """Return the arrays of one case, `[rank, step, ...]`."""
    rng, world = np.random.default_rng([number, *kind.encode()]), meta["world"]
    arrays = {}
    for i, shape in enumerate(SHAPES):
        arrays[f"p{i}/init"] = rng.normal(size=shape).astype(np.float32)
        common = rng.normal(size=(1, STEPS, *shape))
        own = rng.normal(size=(world, STEPS, *shape))
        arrays[f"p{i}/G"] = (common + own).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        with context.Pool(world) as pool:
            tasks = [(r, kind, meta, arrays, f"{folder}/store", checkouts) for r in range(world)]
            ranks = pool.starmap(of_rank, tasks, chunksize=1)
    for key in ranks[0][0]:
        arrays[key] = np.stack([np.stack([step[key] for step in steps]) for steps in ranks])
    return arrays


RUNS = {"demo": demo, "sparta": sparta, "noloco": noloco}
FALLING = [round(0.01 * (1 - t / STEPS), 6) for t in range(STEPS)]
DEMO = {"code": "DeMo", "lr": [0.01] * STEPS, "weight_decay": 0.0, "decay": 0.9, "top_k": 3}
SPARTA = {"selector": "RandomIndexSelector", "optimizer": "SGD", "lr": 0.1, "p": 0.2, "seed": 7}
NOLOCO = {"local_steps": 3, "lr": 0.01, "outer_lr": 0.7, "outer_momentum": 0.5}
CASES = {
    "demo": [
        DEMO | {"world": 2, "chunk": 4},
        DEMO | {"world": 4, "chunk": 5, "decay": 0.999, "weight_decay": 0.1},
        DEMO | {"world": 3, "chunk": 6, "lr": FALLING, "top_k": 1},
        DEMO | {"world": 2, "chunk": 64, "top_k": 32},  # whole leaves, and vectors are sent whole
        DEMO | {"world": 4, "chunk": 6, "code": "gym"},
    ],
    "sparta": [
        SPARTA | {"world": 4},
        SPARTA | {"world": 2, "optimizer": "AdamW", "lr": 0.01},
        SPARTA | {"world": 3, "selector": "ShuffledSequentialIndexSelector"},
        SPARTA | {"world": 4, "selector": "PartitionedIndexSelector"},
    ],
    "noloco": [
        NOLOCO | {"world": 2, "group_size": 2},
        NOLOCO | {"world": 4, "group_size": 2},
        NOLOCO | {"world": 4, "group_size": 4, "outer_momentum": 0.9},
    ],
}

if __name__ == "__main__":
    for kind, metas in CASES.items():
        arrays = {}
        for number, meta in enumerate(metas):
            found = recorded(kind, number, meta, Path(sys.argv[1]).resolve())
            arrays |= {f"case{number}/{key}": value for key, value in found.items()}
            arrays[f"case{number}/meta"] = json.dumps(meta | {"shapes": SHAPES, "steps": STEPS})
        np.savez_compressed(FOLDER / f"{kind}.npz", **arrays)
