"""Recorded runs of FairScale's SlowMoDistributedDataParallel, and the same run in jaxslowmo."""

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

import jaxslowmo as js

FOLDER = Path(__file__).parents[1] / "golden" / "fairscale"
NAMES = sorted(path.stem for path in FOLDER.glob("*.npz"))
HALF = [name for name in NAMES if name.startswith("fp16_")]
GOSSIP = [
    name
    for name in NAMES
    if "sgp_" in name and not name.startswith("singlenode") and name not in HALF
]
LOCAL = [name for name in NAMES if name not in (*GOSSIP, *HALF)]
GRAPHS = {
    "NPeerDynamicDirectedExponentialGraph": js.topology.npeer_directed_exponential,
    "DynamicDirectedExponentialGraph": js.topology.directed_exponential,
    "DynamicDirectedLinearGraph": js.topology.directed_linear,
    "DynamicBipartiteExponentialGraph": js.topology.bipartite_exponential,
    "DynamicBipartiteLinearGraph": js.topology.bipartite_linear,
    "RingGraph": js.topology.ring,
}
FLOAT32 = {"rtol": 1e-5, "atol": 2e-5}


@dataclass
class GoldenRun:
    """One recorded run: configuration, initial parameters, gradients, recorded parameters."""

    config: dict[str, Any]
    arrays: dict[str, np.ndarray]

    @classmethod
    def load(cls, name: str) -> "GoldenRun":
        with np.load(FOLDER / f"{name}.npz") as file:
            arrays = {key: file[key] for key in file.files}
        return cls(json.loads(str(arrays.pop("config"))), arrays)

    @property
    def devices_per_replica(self) -> int:
        return self.config["constructor_args"]["nprocs_per_node"]

    @property
    def axes(self) -> dict[str, int]:
        inner = self.devices_per_replica
        replicas = self.config["world"] // inner
        return {"replica": replicas} if inner == 1 else {"replica": replicas, "device": inner}

    def tree(self, prefix: str) -> dict[str, np.ndarray]:
        return {f"p{i}": self.arrays[f"{prefix}_{i}"] for i in range(len(self.config["shapes"]))}

    def initial(self) -> dict[str, np.ndarray]:
        """Return the initial parameters of each replica's first rank, stacked over replicas."""
        ranks = range(0, self.config["world"], self.devices_per_replica)
        init = self.tree("init")
        if self.config.get("init_per_rank"):
            return {k: v[list(ranks)] for k, v in init.items()}
        return {k: np.broadcast_to(v, (len(ranks), *v.shape)).copy() for k, v in init.items()}

    def of_replicas(self, recorded: np.ndarray) -> np.ndarray:
        """Return the part of `recorded`, `[steps, world, ...]`, of the first rank of every node."""
        return recorded[:, :: self.devices_per_replica]

    @property
    def paused(self) -> frozenset[int]:
        """The updates (from 1) in evaluation mode, in which FairScale does not gossip."""
        return frozenset(t + 1 for t in self.config.get("eval_at", ()))

    def weights(self) -> np.ndarray:
        """Return the push-sum weights after every step, `[steps, replicas]`; 1 without gossip."""
        ranks = self.arrays.get("ps_weight")
        if ranks is None:
            return np.ones((self.config["steps"], self.axes["replica"]), np.float32)
        return self.of_replicas(ranks)

    def check(self, history: list[dict[str, np.ndarray]]) -> None:
        """Raise unless the parameters after every step are the recorded ones."""
        weights = self.weights()
        for key, numerators in self.tree("params").items():
            ours = np.stack([step[key] for step in history])
            recorded = self.of_replicas(numerators)
            recorded = recorded / weights.reshape(*weights.shape, *[1] * (recorded.ndim - 2))
            np.testing.assert_allclose(ours, recorded, **FLOAT32, err_msg=key)

    def optimizer(self) -> optax.GradientTransformation:
        rates = np.asarray(self.config["lr_per_step"], np.float32)
        spec = self.config["optimizer"]

        def one(scale: float) -> optax.GradientTransformation:
            schedule = lambda t: jnp.asarray(rates * np.float32(scale))[t]  # noqa: E731
            if spec["name"] == "adam":
                return optax.adam(schedule)
            return optax.sgd(schedule, momentum=spec.get("momentum"))

        groups, scales = self.config["parameter_groups"], self.config["parameter_group_lr_scale"]
        if len(groups) == 1:
            return one(scales[0])
        labels = {f"p{i}": g for g, members in enumerate(groups) for i in members}
        return optax.partition(dict(enumerate(map(one, scales))), labels)

    def graph(self) -> js.topology.Graph:
        """Return the graph of a gossip run."""
        peers = self.config["peers_per_itr"]
        if self.config["graph"] == "table":
            return js.topology.from_phone_book(self.config["table"], peers)
        return GRAPHS[self.config["graph"]](self.axes["replica"], peers_per_step=peers)

    def base(self, codec: js.codecs.Codec | None = None) -> js.ParameterTransform:
        """Return the transform of FairScale's base algorithm."""
        args = self.config["constructor_args"]
        local_axis = "device" if self.devices_per_replica > 1 else None
        if not self.config["effective"]["sgp"]:
            return js.local_sgd(
                "replica",
                sync_every=args["localsgd_frequency"],
                local_axis_name=local_axis,
                codec=codec,
            )
        keep = self.config.get("mixing_lo")
        return js.sgp(
            "replica",
            graph=self.graph(),
            mixing=None if keep is None else js.topology.self_weighted(keep),
            push_sum=args["push_sum"],
            local_axis_name=local_axis,
            codec=codec,
        )

    def sync(self, codec: js.codecs.Codec | None = None, **overrides: Any) -> js.ParameterTransform:
        """Return the transform that FairScale's arguments describe; `codec` is used by the base."""
        args = self.config["constructor_args"]
        local_axis = "device" if self.devices_per_replica > 1 else None
        base = self.base(codec)
        if not self.config["effective"]["slowmo"]:
            return base
        rates = np.asarray(self.config["lr_per_step"], np.float32)
        sharded = args["slowmo_memory_efficient"]
        options: dict[str, Any] = {
            "shard_state": sharded,
            "exact_average": sharded or args["slowmo_sgp_average_params"],
            "momentum": args["slowmo_momentum"],
            "slow_learning_rate": args["slowmo_lr"],
            "learning_rate": lambda t: jnp.asarray(rates)[t],
            "local_axis_name": local_axis,
        }
        with warnings.catch_warnings():  # some runs have a slow period that is no multiple
            warnings.filterwarnings("ignore", message=".*not a multiple")
            return js.slowmo(
                "replica",
                base=base,
                sync_every=args["slowmo_frequency"],
                **{**options, **overrides},
            )

    def chain(self, sync: js.ParameterTransform) -> optax.GradientTransformationExtraArgs:
        inner = [js.all_reduce_gradients("device")] if self.devices_per_replica > 1 else []
        return optax.chain(*inner, self.optimizer(), sync)
