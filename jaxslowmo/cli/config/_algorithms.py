"""Options that choose the algorithm of a run, and the settings of that algorithm."""

import dataclasses
import functools

from jaxslowmo.topology import GRAPHS, Mixing, self_weighted, uniform_mixing

from ._fields import Checked, option

# run/_recipes.py holds how each is built, and drawn in a picture.
ALGORITHMS = ("all_reduce", "local_sgd", "sgp", "slowmo", "slowmo_sgp", "diloco")
OUTER_ALGORITHMS = ("slowmo", "slowmo_sgp", "diloco")  # those with slow steps


def _used_by(*algorithms: str) -> tuple[str, tuple[str, ...]]:
    """Return the `goes_with` of an option that only these algorithms use."""
    return "algorithm", algorithms


_AVERAGE = _used_by("local_sgd", "slowmo")
_GOSSIP = _used_by("sgp", "slowmo_sgp")
_SLOW = _used_by("slowmo", "slowmo_sgp")
_OUTER = _used_by(*OUTER_ALGORITHMS)
_SPREAD = _used_by("local_sgd", "slowmo", "slowmo_sgp", "diloco")
_PARAMETERS = _used_by(*(name for name in ALGORITHMS if name != "all_reduce"))


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


_option = functools.partial(option, panel="Algorithm")


@dataclasses.dataclass(frozen=True)
class AlgorithmConfig(Checked):
    """The algorithm of a run and its settings; `refuse_unused` checks that they go together."""

    algorithm: str = _option(
        "slowmo",
        "What replicas exchange: gradients every step (all_reduce), parameters with a few peers "
        "every step (sgp) or with all now and then; slowmo goes over local_sgd, slowmo_sgp over "
        "sgp.",
        choices=ALGORITHMS,
    )
    bucket_mib: float = _option(
        25,
        "Size of all_reduce's gradient buckets in MiB, the first one at most 1; see jaxslowmo "
        "tune buckets.",
        goes_with=_used_by("all_reduce"),
        least=0,
        below=2**20,
    )
    sync_every: int = _option(
        12, "Steps between averages (local_sgd, slowmo).", goes_with=_AVERAGE, least=1
    )
    slow_every: int = _option(
        48, "Steps between slow (outer) steps of slowmo and diloco.", goes_with=_OUTER, least=1
    )
    graph: str = _option(
        "npeer_directed_exponential",
        "Who sends to whom in sgp; see jaxslowmo inspect graph.",
        goes_with=_GOSSIP,
        choices=tuple(GRAPHS),
    )
    peers_per_step: int | None = _option(
        None,
        "Peers that a replica sends to in a step of sgp (default: the graph's).",
        goes_with=_GOSSIP,
        least=1,
    )
    overlap: int = _option(
        0,
        "sgp: 0 sends the new parameters; 1 sends those from before the step, while the gradients "
        "are computed (with --mode host, or a graph that does not rotate); k mixes in what was "
        "sent k - 1 steps earlier.",
        goes_with=_GOSSIP,
        least=0,
        below=2**10,  # each is a copy of the parameters in memory
    )
    mixing: str = _option(
        "uniform",
        "What a replica of sgp keeps: as much as each peer gets (uniform), or self_weighted:SHARE.",
        goes_with=_GOSSIP,
        check=parse_mixing,
    )
    slow_momentum: float = _option(
        0.5, "Momentum of slowmo's slow step.", goes_with=_SLOW, least=0, below=1
    )
    slow_learning_rate: float = _option(
        1.0, "Step size of slowmo's slow step.", goes_with=_SLOW, least=0
    )
    nesterov: bool = _option(False, "Nesterov form of slowmo's slow step.", goes_with=_SLOW)
    shard_state: bool = _option(
        True, "Spread slow state over the replicas (slowmo, diloco).", goes_with=_OUTER
    )
    exact_average: bool = _option(
        True,
        "Average in slowmo's slow step; without, it takes what its base left (and implies "
        "--no-shard-state).",
        goes_with=_SLOW,
    )
    fragments: int = _option(
        1,
        "Parts of the model that take turns in the period, each sent by itself; of slowmo and "
        "diloco those of the slow step.",
        goes_with=_SPREAD,
        least=1,
    )
    delay: int = _option(
        0,
        "Steps beside which an exchange runs, before its result is applied.",
        goes_with=_SPREAD,
        least=0,
    )
    merge: float = _option(
        0.0,
        "Share of its own progress that a replica keeps when a result is applied, from 0 to 1.",
        goes_with=_SPREAD,
        least=0,
    )
    codec: str = _option(
        "none",
        "Send parameters in 16 bits (slow state is then whole on each replica); error feedback "
        "is on, and helps sgp in bfloat16.",
        goes_with=_PARAMETERS,
        choices=("none", "bfloat16", "float16"),
    )
    outer_learning_rate: float = _option(
        0.7,
        "Learning rate of diloco's outer optimizer (SGD).",
        goes_with=_used_by("diloco"),
        least=0,
    )
    outer_momentum: float = _option(
        0.9,
        "Nesterov momentum of diloco's outer optimizer.",
        goes_with=_used_by("diloco"),
        least=0,
        below=1,
    )
