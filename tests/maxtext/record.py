"""Record losses: `.venv-maxtext/bin/python tests/maxtext/record.py`.

It writes tests/golden/maxtext/losses.json: for each exchange and model of `runs.py` the losses of
all updates, the mean over two replicas, of MaxText's own DiLoCo and of examples/maxtext.
"""

import importlib.metadata
import json
from typing import Any

from maxtext.trainers.pre_train import train as its_own
from runs import EXCHANGES, ITS_OWN, MODELS, RECORDED, equal_keys, losses, other_batches, run

import train


def main() -> None:
    """Run every model with every exchange."""
    found: dict[str, Any] = {
        "versions": {x: importlib.metadata.version(x) for x in ("maxtext", "jax", "flax")}
    }
    for exchange, options in EXCHANGES.items():
        found[exchange] = {}
        for model, more in MODELS.items():
            with other_batches(), equal_keys():
                runs = {
                    "maxtext": run(its_own.main, **options, **ITS_OWN[exchange], **more),
                    "jaxslowmo": run(train.main, **options, **more),
                }
            values = {who: [float(f"{x:.8g}") for x in losses(r)] for who, r in runs.items()}
            found[exchange][model] = values
            print(exchange, model, values, flush=True)
    RECORDED.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
