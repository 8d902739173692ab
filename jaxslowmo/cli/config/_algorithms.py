"""Options that choose the algorithm of a run, and the settings of that algorithm."""

import dataclasses
from typing import Annotated

from jaxslowmo.topology import GRAPHS, Mixing, self_weighted, uniform_mixing

from ._options import Count, Natural, NotNegative, OneOf, Options, Range, Share

# run/_recipes.py holds how each is built, and drawn in a picture.
ALGORITHMS = ("all_reduce", "local_sgd", "sgp", "slowmo", "slowmo_sgp", "diloco")
OUTER_ALGORITHMS = ("slowmo", "slowmo_sgp", "diloco")  # those with slow steps


def parse_mixing(text: str) -> Mixing:
    """Return the mixing that a text like "uniform" or "self_weighted:0.7" names.

    Raises:
      ValueError: the text is neither, or the share is outside (0, 1).
    """
    name, colon, share = text.partition(":")
    if name == "uniform" and not colon:
        return uniform_mixing()
    if name == "self_weighted":
        try:
            return self_weighted(float(share))
        except ValueError:
            pass  # not a number, or not between 0 and 1
    raise ValueError(
        "--mixing must be uniform, or self_weighted:SHARE with a share between 0 and 1, such as "
        f"self_weighted:0.7; got {text}"
    )


MixingName = Annotated[str, lambda flag, text: parse_mixing(text)]


@dataclasses.dataclass(frozen=True)
class AlgorithmConfig(Options):
    """The algorithm of a run and its settings; a table in `_training` says which go together."""

    HEADING = "Algorithm"

    algorithm: Annotated[str, OneOf(*ALGORITHMS)] = "slowmo"
    """What replicas exchange: gradients every step (all_reduce), parameters with a few peers every
    step (sgp) or with all now and then; slowmo goes over local_sgd, slowmo_sgp over sgp."""
    bucket_mib: Annotated[float, Range(0, 2**20)] = 25
    """Size of all_reduce's gradient buckets in MiB, the first one at most 1; see jaxslowmo tune
    buckets."""
    sync_every: Count = 12
    """Steps between averages (local_sgd, slowmo)."""
    slow_every: Count = 48
    """Steps between slow (outer) steps of slowmo and diloco."""
    graph: Annotated[str, OneOf(*GRAPHS)] = "npeer_directed_exponential"
    """Who sends to whom in sgp; see jaxslowmo inspect graph."""
    peers_per_step: Count | None = None
    """Peers that a replica sends to in a step of sgp (default: the graph's)."""
    overlap: Annotated[int, Range(0, 2**10)] = 0  # each is a copy of the parameters in memory
    """sgp: 0 sends the new parameters; 1 sends those from before the step, while the gradients are
    computed (with --mode host, or a graph that does not rotate); k mixes in what was sent k - 1
    steps earlier."""
    mixing: MixingName = "uniform"
    """Share that a replica of sgp keeps: that of each peer (uniform), or self_weighted:SHARE."""
    slow_momentum: Share = 0.5
    """Momentum of slowmo's slow step."""
    slow_learning_rate: NotNegative = 1.0
    """Step size of slowmo's slow step."""
    nesterov: bool = False
    """Nesterov form of slowmo's slow step."""
    shard_state: bool = True
    """Spread slow state over the replicas (slowmo, diloco)."""
    exact_average: bool = True
    """Average in slowmo's slow step; without, it takes what its base left (and implies
    --no-shard-state)."""
    fragments: Count = 1
    """Parts of the model that take turns in the period, each sent by itself; of slowmo and diloco
    those of the slow step."""
    delay: Natural = 0
    """Steps beside which an exchange runs, before its result is applied."""
    merge: NotNegative = 0.0
    """Share of its own progress that a replica keeps when a result is applied, from 0 to 1."""
    codec: Annotated[str, OneOf("none", "bfloat16", "float16")] = "none"
    """Send parameters in 16 bits (slow state is then whole on each replica); error feedback is on,
    and helps sgp in bfloat16."""
    outer_learning_rate: NotNegative = 0.7
    """Learning rate of diloco's outer optimizer (SGD)."""
    outer_momentum: Share = 0.9
    """Nesterov momentum of diloco's outer optimizer."""
