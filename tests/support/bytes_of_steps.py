"""Formulas for the bytes that a device, a TPU chip or a GPU, sends in a step.

R replicas of L devices each; N bytes of float32 parameters. On one slice or host every device is a
replica (L = 1), and all goes over its links. On several slices or hosts each is a replica, "device"
runs inside of them and "replica" between them. Every collective counts as a ring over n devices:
2 (n - 1) / n of an all-reduce, (n - 1) / n of a reduce-scatter or an all-gather.

| kind of step | over "replica" | over "device", beside the gradients' all-reduce |
|---|---|---|
| local | 0 | 0 |
| average | 2 (R - 1) / R N / L | (L - 1) / L N |
| round of gossip, 1 peer | N / L | (L - 1) / L N |
| slow, sharded | 2 (R - 1) / R N / L | (L - 1) / L (N + N / R) |
| every (all_reduce), by levels | 2 (R - 1) / R N / L | no more |
| flat (all_reduce), over all | 2 (R L - 1) / (R L) N | the loss alone |

Gradients are averaged over "device" in each step: 2 (L - 1) / L (N + 4), the loss with them. TPU
compilers reduce over both axes level by level; on GPUs it is one all-reduce over all devices, whose
ring NCCL lays.
"""

from dataclasses import dataclass

ITEM_BYTES = 4  # of a float32
LOSS_BYTES = 4
# Parts of a buffer are padded to an even number of (8, 128) tiles, 8 KiB, on GPUs too. (Above 200
# tiles the multiple grows with the part; there are no such parts here.)
PADDED_TO = 2 * 8 * 128


@dataclass(frozen=True)
class Sent:
    """Bytes that a device sends in one step, over the axis "replica" and over "device"."""

    replica: int
    device: int


def padded(num_elements: int, parts: int) -> int:
    """Return the size of a buffer of `num_elements` padded to equal parts of whole tile pairs."""
    return parts * PADDED_TO * -(-num_elements // (parts * PADDED_TO))


def bytes_sent(
    kind: str, num_elements: int, replicas: int, devices: int, *, with_padding: bool = True
) -> Sent:
    """Return the bytes that a device sends, by the formulas above.

    Args:
      kind: "local", "average", "round" of gossip to one peer, "slow" (sharded), "every" or "flat".
      num_elements: number of float32 parameters.
      replicas: number of replicas, R.
      devices: number of devices of a replica, L.
      with_padding: whether to add the padding of parts, which the formulas leave out; it is
        unknown for "every", whose parts the compiler makes.
    """
    average = kind in ("average", "round")
    parts = {"slow": replicas * devices}.get(kind, devices if average and devices > 1 else 0)
    elements = padded(num_elements, parts) if parts and with_padding else num_elements
    whole = ITEM_BYTES * elements
    per_device = whole // devices
    between = {
        "local": 0,
        "average": _two_ways(per_device, replicas),
        "round": per_device,
        "slow": 2 * _one_way(per_device, replicas),
        "every": _two_ways(per_device, replicas),
        "flat": _two_ways(whole, replicas * devices),
    }[kind]
    gathers = {
        "average": _one_way(whole, devices),
        "round": _one_way(whole, devices),
        "slow": _one_way(whole, devices) + _one_way(whole // replicas, devices),
    }.get(kind, 0)
    gradients = 0 if kind == "flat" else ITEM_BYTES * num_elements
    return Sent(between, _two_ways(gradients + LOSS_BYTES, devices) + gathers)


def _one_way(num_bytes: int, devices: int) -> int:
    return num_bytes * (devices - 1) // devices


def _two_ways(num_bytes: int, devices: int) -> int:
    return 2 * num_bytes * (devices - 1) // devices
