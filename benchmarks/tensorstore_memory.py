"""What tensorstore keeps of every answer in JSON: the memory that a save leaves behind.

    python benchmarks/tensorstore_memory.py

Orbax asks for a specification of each array, and twice for the metrics of all, at every save.
"""

import gc
import tempfile
from importlib.metadata import version
from pathlib import Path

import tensorstore as ts

CALLS = 20_000


def resident() -> int:
    """Bytes of memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = {"driver": "file", "path": f"{folder}/"}
        zarr = {"driver": "zarr", "kvstore": file}
        store = ts.open(zarr, create=True, dtype=ts.float32, shape=[3]).result()
        store.write([1, 2, 3]).result()
        kvstore = ts.KvStore.Spec(file)
        calls = {
            "KvStore.Spec.to_json": kvstore.to_json,
            "TensorStore.spec().to_json": lambda: store.spec().to_json(),
            "experimental_collect_matching_metrics": lambda: (
                ts.experimental_collect_matching_metrics("/tensorstore/kvstore/")
            ),
            "write (no JSON)": lambda: store.write([1, 2, 3]).result(),
        }
        print(f"tensorstore {version('tensorstore')}, {CALLS} calls each")
        for name, call in calls.items():
            call()
            before = resident()
            for _ in range(CALLS):
                call()
            gc.collect()
            print(f"{name}: {(resident() - before) / CALLS:.0f} bytes per call")


if __name__ == "__main__":
    main()
