"""Compute the anchors of a run again from what lies in its bucket, by NumPy and nothing of ours.

    python tests/support/replay.py s3://bucket/run

Prints one JSON object: the number of rounds, the digest of each anchor, the islands of each round,
parts that no round counts, snapshots, and what is wrong. The outer step is SGD with Nesterov
momentum, rate 0.7 and momentum 0.9; parts are float32.
"""

import hashlib
import json
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import obstore
from obstore import store as stores
from safetensors.numpy import load

RATE, MOMENTUM = np.float32(0.7), np.float32(0.9)


def objects(url: str) -> Mapping[str, bytes]:
    """All objects below a URL or in a folder."""
    if url.startswith("s3:"):
        place: Any = stores.from_url(url, client_options={"allow_http": True})
    else:
        place = stores.LocalStore(url)
    keys = [entry["path"] for entry in obstore.list(place).collect()]
    return {key: bytes(obstore.get(place, key).bytes()) for key in keys}


def header(data: bytes) -> dict[str, Any]:
    size = int.from_bytes(data[:8], "little")
    return json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["islands"])


def digest_of(number: int, arrays: list[np.ndarray]) -> str:
    joined = b"".join([number.to_bytes(8, "little"), *(x.tobytes() for x in arrays)])
    return hashlib.sha256(joined).hexdigest()


def replay(found: Mapping[str, bytes]) -> dict[str, Any]:
    run, wrong = json.loads(found["run.json"]), []
    names = [leaf.rpartition("[")[0] for leaf in run["leaves"]]
    arrays = load(found[f"snapshots/{0:08d}-{run['digest'][:16]}"])
    anchor = [arrays[f"anchor/{name}"] for name in names]
    traces = [arrays[f"outer/{i}"] for i in range(len(names))]
    digests, islands, counted = [digest_of(0, [*anchor, *traces])], [], set()
    ends = np.cumsum([x.size for x in anchor])[:-1]
    while (key := f"rounds/{len(islands):08d}/manifest.json") in found:
        parts = json.loads(found[key])["parts"]
        heads = [header(found[part]) for part in parts]
        sent = [load(found[part])["displacement"] for part in parts]
        if other := [h["island"] for h in heads if h["anchor"] != digests[-1]]:
            wrong.append(f"round {len(islands)}: {other} started from another anchor")
        whole, mean = sum(h["weight"] for h in heads), None
        for head, x in zip(heads, sent, strict=True):
            term = x * np.float32(head["weight"] / whole)
            mean = term if mean is None else mean + term
        assert mean is not None
        steps = [x.reshape(a.shape) for x, a in zip(np.split(mean, ends), anchor, strict=True)]
        traces = [g + MOMENTUM * t for g, t in zip(steps, traces, strict=True)]
        moves = [-RATE * (g + MOMENTUM * t) for g, t in zip(steps, traces, strict=True)]
        anchor = [a + move for a, move in zip(anchor, moves, strict=True)]
        counted |= {*parts}
        islands.append([h["island"] for h in heads])
        digests.append(digest_of(len(islands), [*anchor, *traces]))
    later = [key for key in found if "manifest" in key and int(key[7:15]) >= len(islands)]
    wrong += [f"{key} follows a round that is missing" for key in later]
    snapshots = sorted(key for key in found if key.startswith("snapshots/"))
    for key in snapshots:
        number, short = int(key[10:18]), key[19:]
        if number >= len(digests) or digests[number][:16] != short:
            wrong.append(f"{key} is no anchor of the rounds")
    left = sorted(key for key in found if "/part-" in key and key not in counted)
    return {
        "rounds": len(islands), "digests": digests, "islands": islands, "left": left,
        "snapshots": snapshots, "wrong": wrong,
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(replay(objects(sys.argv[1]))))
