"""Train a language model with SlowMo under torchrun, on GPUs or on the CPU, without torch_xla.

    torchrun --standalone --nproc-per-node 2 -m torch_compat.examples.train_torchrun

Every process trains a replica with its own samples and its own AdamW: over NCCL with a GPU for each
process, otherwise over gloo.
"""

import os
import sys

import torch
import torch.distributed as dist

from ..slowmo import SlowMoDistributedDataParallel
from .arguments import MODEL, SLOWMO, STEPS, TRAINING, Parser
from .model import LanguageModel
from .replicas import no_output, run

parse = Parser("train_torchrun", __doc__, STEPS, TRAINING, SLOWMO, MODEL).parse


def join() -> torch.device:
    """Join the processes that torchrun has started, and return the device of this one."""
    if "LOCAL_RANK" not in os.environ:
        sys.exit("Start this program by torchrun, which connects the processes.")
    if not torch.cuda.is_available():
        with no_output():
            dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def main(arguments: list[str] | None = None) -> None:
    """Train the replica of this process."""
    options, device = parse(arguments), join()
    torch.manual_seed(options.seed)  # all replicas start from equal parameters
    model = LanguageModel(options.config).to(device)
    net = SlowMoDistributedDataParallel(model, **options.slowmo)
    optimizer = torch.optim.AdamW(net.parameters(), lr=options.learning_rate)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = net(input_ids=tokens, labels=tokens)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        net.perform_slowmo(optimizer)
        return loss

    try:
        run(net, options, step)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
