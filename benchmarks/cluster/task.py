"""What both libraries train, and how long a turn of a variant is. Only NumPy."""

import numpy as np

WIDTH, LAYERS, BATCH = 512, 5, 128  # of one host; 5.25 MB of float32 parameters
LEARNING_RATE, MOMENTUM = 0.01, 0.9
RATES = ("100mbit", "200mbit", "1gbit")
HOSTS = 4

# Steps of a turn: whole periods of whatever is exchanged.
JAX = {
    "no communication": 48,
    "all_reduce": 6,
    "all_reduce, apart": 6,
    "local_sgd(3)": 12,
    "local_sgd(12)": 24,
    "local_sgd(24)": 48,
    "local_sgd(24, delay=20)": 48,
    "local_sgd(48)": 48,
    "local_sgd(48, delay=40)": 48,
    "sgp": 6,
    "sgp, overlapped": 6,
    "slowmo(12, 48)": 48,
    "diloco(48)": 48,
    "diloco(48, delay=40)": 48,
    "diloco(48, fragments=4, delay=8)": 48,
    "int8": 6,
}
TORCH = {
    "no communication": 48,
    "DDP": 6,
    "PostLocalSGD(3)": 12,
    "PostLocalSGD(12)": 24,
    "PostLocalSGD(24)": 48,
    "PostLocalSGD(48)": 48,
    "FairScale SlowMo(12, 48)": 48,
    "torchft DiLoCo(48)": 48,
    "torchft DiLoCo(48, delay=40)": 48,
    "torchft DiLoCo(48, fragments=4, delay=8)": 48,
    "torch_compat LocalSGD(12)": 24,
    "torch_compat SlowMo(12, 48)": 48,
    "torch_compat SlowMo(48)": 48,
    "torch_compat SGP": 6,
}


def parameters() -> list[tuple[np.ndarray, np.ndarray]]:
    """Matrix and bias of each layer."""
    rng = np.random.default_rng(0)
    shape = (WIDTH, WIDTH)
    return [
        ((rng.standard_normal(shape) / np.sqrt(WIDTH)).astype(np.float32), np.zeros(WIDTH, "f4"))
        for _ in range(LAYERS)
    ]


def batch(rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of one host."""
    rng = np.random.default_rng(1 + rank)
    shape = (2, BATCH, WIDTH)
    x, y = rng.standard_normal(shape, np.float32)
    return x, y


def num_bytes() -> int:
    return 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
