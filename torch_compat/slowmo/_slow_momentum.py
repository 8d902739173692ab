"""Slow momentum in one process: anchor and velocity of named parameters, and its steps."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ._collectives import Collectives
from ._flat import flatten
from ._gossip import PushSum
from ._graphs import device_data, own_graph, to_device
from ._parameters import Groups, Parameters
from ._start import check_equal
from .backends import Kind


@dataclass
class Rates:
    """The learning rates that the carried part of slow momentum depends on, per parameter.

    Attributes:
      last: gamma of the last slow step; 0 before the first.
      made_at: r, the rate at which the velocity was made: the largest gamma between the last two
        slow steps, or momentum times the previous r if that is more; 0 if not known.
      since: the largest gamma since the last slow step; 0 if none was observed.
    """

    last: list[float]
    made_at: list[float]
    since: list[float]

    def select(self, places: Sequence[int | None]) -> "Rates":
        """Return the rates of the parameters at `places` in these; None is a new parameter."""
        fields = (self.last, self.made_at, self.since)
        return Rates(*([0.0 if i is None else rates[i] for i in places] for rates in fields))

    def observe(self, rates: Sequence[float]) -> None:
        """Note the rates of an update, slow or not: the velocity will hold its displacement."""
        self.since = list(map(max, self.since, rates))

    def carry(self, rates: Sequence[float], momentum: float) -> list[float]:
        """Return the factor of the velocity in a slow step at `rates`, and note `rates`.

        It is momentum * gamma_now / gamma_before, with 1 for a ratio whose divisor is 0. It is at
        most gamma_now / r, or momentum if that is more: FairScale's formula, which has no bound,
        can diverge after a small rate.

        Source: `jaxslowmo.slow_momentum`, which has the same rule.
        """
        factors = []
        for now, last, made_at in zip(rates, self.last, self.made_at, strict=True):
            limit = max(momentum, _ratio(now, made_at))
            factors.append(min(momentum * _ratio(now, last), limit))
        self.observe(rates)
        self.made_at = [
            max(momentum * r, high) for r, high in zip(self.made_at, self.since, strict=True)
        ]
        self.last, self.since = list(rates), [0.0] * len(rates)
        return factors


def _ratio(now: float, before: float) -> float:
    return now / before if before else 1.0


@dataclass(frozen=True)
class Span:
    """The part of the flat vector of named parameters that a process keeps.

    Attributes:
      sizes: number of elements of each parameter, by name, in the module's order.
      num_parts: number of equal parts; the last ones may reach beyond the end of the vector.
      index: index of this part.
    """

    sizes: Mapping[str, int]
    num_parts: int = 1
    index: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters."""
        return tuple(self.sizes)

    @property
    def total(self) -> int:
        """The number of elements of the vector."""
        return sum(self.sizes.values())

    @property
    def length(self) -> int:
        """The number of elements of the part, padding included."""
        return math.ceil(self.total / self.num_parts)

    @property
    def padded_length(self) -> int:
        """The number of elements of all parts together."""
        return self.num_parts * self.length

    def split(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the elements of each parameter in a whole vector, padded or not."""
        parts = flat[: self.total].split(list(self.sizes.values()))
        return dict(zip(self.names, parts, strict=True))

    def part(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return this part of the vector of `values`, those of all names in order; a copy.

        On an XLA device call it inside `own_graph`. The index of the part is data, so that the
        graph is the same on all processes.
        """
        rows = self.num_parts + 1  # one more, so that the result is never a view of a parameter
        flat = flatten(values, rows * self.length).reshape(rows, self.length)
        index = device_data([self.index], torch.int64, flat.device)
        return flat.index_select(0, index).reshape(-1)

    def per_element(self, values: Sequence[float], device: torch.device) -> torch.Tensor:
        """Return the value of each element's parameter, (length,)."""
        begin, spans, end = self.index * self.length, [], 0
        for size in self.sizes.values():
            end += size
            spans.append(min(max(end - begin, 0), self.length))
        spans[-1] = self.length  # the padding takes the last value
        counts = torch.tensor([0, *spans]).diff()
        each = torch.tensor(values, dtype=torch.float32).repeat_interleave(counts)
        return to_device([each], device)[0]


@dataclass
class SlowMomentum:
    """The slow step on the flat vector of named parameters.

    With D = anchor - average, gamma the learning rate of the parameter now:

        m <- momentum * m + D / gamma;   anchor <- anchor - slow_lr * gamma * m;   params = anchor

    The state is v = gamma * m, and its carried part is rescaled by gamma_now / gamma_before (1 if
    gamma_before is 0), so that a learning rate of 0 makes neither inf nor NaN. `Rates` computes the
    factor.

    Attributes:
      span: the part that this process keeps.
      anchor: (span.length,) float32, the parameters after the last slow step.
      velocity: (span.length,) float32, v.
      rates: the learning rates that the carried part depends on, one for each name.
      has_one_rate: whether all parameters are in one group of an optimizer.

    Source: Wang et al., "SlowMo: Improving Communication-Efficient Distributed SGD with Slow
      Momentum", ICLR 2020 (arXiv:1910.00643), algorithm 1.
    """

    span: Span
    anchor: torch.Tensor
    velocity: torch.Tensor
    rates: Rates
    has_one_rate: bool = False

    def move_to(self, device: torch.device) -> None:
        """Move tensors that were loaded on the host to the device of the parameters."""
        if self.anchor.device != device:
            self.anchor, self.velocity = to_device([self.anchor, self.velocity], device)

    def step(self, average: torch.Tensor, carry: Sequence[float], slow_lr: float) -> None:
        """Take the slow step, after which `anchor` holds the new parameters.

        Args:
          average: (span.length,) float32, this part of the average of the parameters.
          carry: factor of the velocity of every parameter, see `Rates.carry`.
          slow_lr: step size of the slow step.
        """
        factors = self._factors(carry, average.device)
        self.velocity = factors * self.velocity + (self.anchor - average)
        self.anchor = self.anchor - slow_lr * self.velocity

    def momentum_buffer(self) -> torch.Tensor:
        """Return m = v / gamma, as FairScale keeps it; v if gamma was 0."""
        return self.velocity / self._factors(
            [rate or 1.0 for rate in self.rates.last], self.velocity.device
        )

    def _factors(self, values: Sequence[float], device: torch.device) -> torch.Tensor:
        # Parameters that came later have other rates in the past.
        if self.has_one_rate and len(set(values)) == 1:
            return device_data(values[:1], torch.float32, device)
        return self.span.per_element(values, device)


class SlowSteps:
    """The start of slow momentum, and its steps, in one process.

    Args:
      is_sharded: whether every process keeps a part of anchor and momentum, and slow steps average
        exactly over all processes; otherwise each keeps them whole and nothing is sent.

    Attributes:
      momentum: anchor and velocity; None before there is an anchor.
      initial: float32 vectors by name: values of parameters that have no anchor yet, which the
        first forward pass in training mode saw after they were to be trained.
      is_loaded: whether weights were loaded into the module since slow momentum was anchored.
    """

    def __init__(self, collectives: Collectives, push_sum: PushSum, *, is_sharded: bool) -> None:
        self._collectives = collectives
        self._push_sum = push_sum
        self.is_sharded = is_sharded
        self.momentum: SlowMomentum | None = None
        self.initial: dict[str, torch.Tensor] = {}
        self.is_loaded = False
        # The parameters that slow momentum knows, by name; None for those of a state dict.
        self._known: dict[str, torch.Tensor | None] = {}
        self._compared: tuple[str, ...] | None = None
        self._foreign = 0

    def span(self, sizes: Mapping[str, int]) -> Span:
        """Return the part of slow momentum of these parameters that this process keeps."""
        places = self._collectives.places
        return Span(sizes, places.world_size, places.rank) if self.is_sharded else Span(sizes)

    def resume(self, momentum: SlowMomentum | None, initial: Mapping[str, torch.Tensor]) -> None:
        """Continue from saved values."""
        self.momentum, self.initial, self._compared = momentum, dict(initial), None
        self._known = dict.fromkeys([*initial, *(momentum.span.names if momentum else ())])

    def remember(self, params: Mapping[str, torch.Tensor], device: torch.device) -> None:
        """Keep the values of parameters that are new among those exchanged.

        Raises:
          UserWarning: the module has other parameters under some names, which start anew.
        """
        self.is_loaded &= bool(self._known)  # else it was before the first forward pass
        known = {name: id(param) for name, param in self._known.items() if param is not None}
        replaced = [n for n, p in params.items() if known.get(n, id(p)) != id(p)]
        new = {n: p for n, p in params.items() if n in replaced or n not in self._known}
        if new:
            with own_graph(device):
                floats = {n: p.detach().float() for n, p in new.items() if p.is_floating_point()}
                self.initial |= {name: flatten([value]) for name, value in floats.items()}
        self._known = {**params}
        if replaced:
            warnings.warn(
                f"The module has new parameters under the names {', '.join(map(repr, replaced))}: "
                "slow momentum of these starts anew, at their present values.",
                stacklevel=5,
            )

    def anchor_now(self, groups: Groups, params: Parameters) -> None:
        """Anchor slow momentum at the current parameters.

        Raises:
          ValueError: parameters in half precision.

        Communication: that of `ready`.
        """
        self.momentum, self.initial, self.is_loaded = None, {}, False
        self._known = {**params.by_name}
        self._arrange(groups, params)

    def ready(self, groups: Groups, params: Parameters) -> SlowMomentum:
        """Return slow momentum of the optimizers' parameters on their device.

        The first call starts it. If the optimizers hold other parameters than before, it keeps
        anchor and velocity of those that stay, and starts those that are new. The `stacklevel` of
        warnings is that of the caller of `perform_slowmo`, which calls this.

        Raises:
          ValueError: parameters that are not float32, or different ones on other processes.
          UserWarning: slow momentum starts at current values, since no initial ones were kept;
            weights were loaded into the module; the warning of `remember`; or optimizers hold
            parameters of other modules.

        Communication: for other parameters than in the call before one all-gather of 16 bytes per
          process, and if sharded two of anchor and velocity.
        """
        if self.momentum is None and not self.initial:
            warnings.warn(
                "Slow momentum is anchored at the present parameters, as no forward pass in "
                "training mode came first: see _init_global_momentum_buffers(optimizer).",
                stacklevel=4,
            )
            self._known = {**params.by_name}
        elif self.is_loaded:
            warnings.warn(
                "Weights were loaded into the module, from which slow steps go back to the anchor: "
                "call _init_global_momentum_buffers(optimizer) after loading.",
                stacklevel=4,
            )
        self.is_loaded = False
        self.remember(params.by_name, params.device)
        momentum = self.momentum
        if momentum is None or self.initial or momentum.span.names != groups.names:
            momentum = self._arrange(groups, params)
        self._compare(groups, params)
        self.initial = {}
        if groups.foreign > self._foreign:
            warnings.warn(
                f"`optimizer` holds {groups.foreign} parameters that are not the module's, which "
                "are left as they are.",
                stacklevel=4,
            )
        self._foreign = groups.foreign
        momentum.has_one_rate = groups.are_one
        momentum.move_to(params.device)
        momentum.rates.observe(groups.rates(params.device))
        return momentum

    def step(
        self,
        slow: SlowMomentum,
        rates: Sequence[float],
        params: Parameters,
        decay: float,
        slow_lr: float,
    ) -> None:
        """Take a step of slow momentum on the optimizers' parameters.

        Args:
          slow: result of `ready`.
          rates: learning rate of each parameter in slow momentum.
          params: parameters of the module.
          decay: factor of the slow momentum, in [0, 1).
          slow_lr: step size of the slow step.

        Communication: if it is sharded one reduce-scatter and one all-gather of the float32 vector
          over all processes, and an all-reduce of 4 bytes if push-sum weights can differ from 1;
          otherwise nothing.
        """
        push_sum, collectives, names = self._push_sum, self._collectives, slow.span.names
        carry = slow.rates.carry(rates, decay)
        weights: list[torch.Tensor] = []
        # Masters stay numerators; the step is computed on their estimates.
        of_numerators = push_sum.moves and not self.is_sharded and params.masters is not None
        with own_graph(params.device) as writes:
            present = [param.detach() for param in params.tensors]
            if push_sum.moves and self.is_sharded:
                # The average is sum x / sum w.
                present = push_sum.numerators(present)
                weights = collectives.only_masters(collectives.shares([push_sum.weight]))
                # w becomes 1, so parameters without slow momentum must become estimates.
                estimates = push_sum.estimates(present)
                writes.extend(zip(params.tensors, estimates, strict=True))
            elif push_sum.moves and push_sum.is_numerator and not of_numerators:
                present = push_sum.estimates(present)
                writes.extend(zip(params.tensors, present, strict=True))
            by_name: Mapping[str, torch.Tensor] = dict(zip(params.by_name, present, strict=True))
            trained = params.optimizer_params() if params.masters else by_name
            flat = flatten([trained[name] for name in names], slow.span.padded_length)
            if of_numerators:
                flat = flat * (1 / push_sum.weight)
        if self.is_sharded:
            with collectives.graph(params.device, Kind.SLOW_STEP, [flat]):
                weights = collectives.total(weights)
                average = collectives.scatter_mean(flat)
                if weights:
                    average = average * (1 / weights[0])
                    push_sum.weight = torch.ones_like(weights[0])
                slow.step(average, carry, slow_lr)
                flat = collectives.gather(slow.anchor)
        else:
            with own_graph(params.device):
                slow.step(flat, carry, slow_lr)
                flat = slow.anchor * push_sum.weight if of_numerators else slow.anchor
        with own_graph(params.device) as writes:
            writes.extend(params.become_flat(names, flat))
        push_sum.is_numerator = of_numerators

    def _compare(self, groups: Groups, params: Parameters) -> None:
        """Raise `ValueError` unless the optimizers of all processes hold the same parameters."""
        if self._compared != groups.names and self._collectives.places.world_size > 1:
            names, collectives = groups.names, self._collectives
            check_equal(params.by_name, names, collectives, params.device, values=False)
        self._compared = groups.names

    def _arrange(self, groups: Groups, params: Parameters) -> SlowMomentum:
        """Start slow momentum of the optimizers' parameters, or rearrange what there is of it."""
        trained, device, before = params.optimizer_params(), params.device, self.momentum
        wrong = [name for name in groups.names if trained[name].dtype != torch.float32]
        if wrong:
            raise ValueError(
                f"`optimizer` must hold float32 parameters under slow momentum, {wrong[0]!r} is "
                f"{trained[wrong[0]].dtype}: give it float32 masters, and pass `fp32_params`."
            )
        self._compare(groups, params)
        anchors: dict[str, torch.Tensor] = {}
        velocities: dict[str, torch.Tensor] = {}
        if before is not None:
            before.move_to(device)
            anchor, velocity = before.anchor, before.velocity
            if self.is_sharded:
                with self._collectives.graph(device, Kind.REARRANGEMENT, [anchor, velocity]):
                    anchor, velocity = map(self._collectives.gather, (anchor, velocity))
            anchors, velocities = before.span.split(anchor), before.span.split(velocity)
            for name in self.initial.keys() & velocities.keys():
                del velocities[name]
        span = self.span({name: trained[name].numel() for name in groups.names})
        with own_graph(device):
            initial = {name: value.to(device) for name, value in self.initial.items()}
            start = {**trained, **anchors, **initial}
            carried = [velocities.get(n, torch.zeros_like(start[n])) for n in groups.names]
            names = () if before is None else before.span.names
            places = {name: i for i, name in enumerate(names) if name not in initial}
            known = Rates([], [], []) if before is None else before.rates
            rates = known.select([places.get(name) for name in groups.names])
            anchor = span.part([start[name] for name in groups.names])
            self.momentum = SlowMomentum(span, anchor, span.part(carried), rates)
        return self.momentum
