"""What a wrapper saves beside the parameters, and what it takes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ._collectives import own_graph
from ._flat import times
from ._slow_momentum import SlowMomentum

if TYPE_CHECKING:
    from ._wrapper import SlowMoDistributedDataParallel as Wrapper

# FairScale's two; the others are ours. All values are tensors.
_FAIRSCALE = ("ps_weight", "is_sgp_ps_numerator")
_PREFIX = "slowmo."
_SLOW = ("anchor", "velocity", "rates", "ends", "whole_anchor", "whole_velocity", "initial")
_WEIGHT_TOLERANCE = 1e-5


def entries_of(wrapper: Wrapper) -> dict[str, torch.Tensor]:
    """The wrapper's own entries.

    Returns:
      ps_weight (1,) float32 and is_sgp_ps_numerator () bool with SGP; slowmo.num_updates,
      .exchanges, .rank, .world_size () int64; once there is slow momentum slowmo.anchor and
      .velocity (shard,) float32, .rates (groups,) float64, .ends (groups,) int64; before, once a
      forward pass has seen them, slowmo.initial (N + 1,) float32, the initial parameters.
    """
    entries: dict[str, Any] = {
        "num_updates": wrapper.num_updates,
        "exchanges": wrapper._averaging.exchanges,
        "rank": wrapper.process_rank,
        "world_size": wrapper.process_world_size,
    }
    slow = wrapper._slow
    if slow.momentum is not None:
        entries |= _slow_entries(slow.momentum)
        entries |= {"anchor": slow.momentum.anchor, "velocity": slow.momentum.velocity}
    elif slow.initial is not None:
        entries["initial"] = slow.initial
    own = {_PREFIX + key: _tensor(value) for key, value in entries.items()}
    if wrapper.sgp:
        own["ps_weight"] = wrapper.ps_weight
        own["is_sgp_ps_numerator"] = torch.tensor(wrapper.is_sgp_ps_numerator)
    return own


def consolidate(wrapper: Wrapper) -> dict[str, Any]:
    """The state of all processes in one, on this one's device."""
    collectives, module, device = wrapper._collectives, wrapper.module, wrapper._device()
    params = [p for p in module.parameters() if p.is_floating_point()]
    buffers = list(module.buffers())
    push_sum, slow = wrapper._push_sum, wrapper._slow.momentum
    whole = [] if wrapper._slow.initial is None else [wrapper._slow.initial]
    if slow is not None and not wrapper.slowmo_memory_efficient:
        whole = [slow.anchor, slow.velocity]
    with own_graph(device):
        shares = collectives.shares([*push_sum.numerators(params), *whole, push_sum.weight])
        shares = collectives.only_masters(shares)
        spoken = collectives.only_first(buffers)
    with own_graph(device):
        *means, weight = collectives.total(shares)
        spoken = collectives.total(spoken)
        if slow is not None and wrapper.slowmo_memory_efficient:
            whole = [collectives.gather(part) for part in (slow.anchor, slow.velocity)]
    with own_graph(device):
        whole = means[len(params) :] or whole
        if slow is not None:
            # No view: reading one would launch a graph of its own, unordered.
            whole = [value[: slow.span.total].clone() for value in whole]
        means = means[: len(params)]
        if push_sum.moves:
            means = [times(mean, 1 / weight) for mean in means]
        copies = [value.to(b.dtype) for b, value in zip(buffers, spoken, strict=True)]
    replaced = dict(zip(map(id, [*params, *buffers]), [*means, *copies], strict=True))

    state = {}
    for key, value in wrapper.state_dict(keep_vars=True).items():
        value = replaced.get(id(value), value)
        state[key] = value.detach() if isinstance(value, torch.Tensor) else value
    for key in ("rank", "world_size", "anchor", "velocity"):
        state.pop(_PREFIX + key, None)
    if wrapper.sgp:
        state["ps_weight"] = torch.ones(1)
        state["is_sgp_ps_numerator"] = torch.tensor(False)
    names = ("whole_anchor", "whole_velocity") if slow is not None else ("initial",)
    for name, value in zip(names, whole, strict=False):
        state[_PREFIX + name] = value
    return state


@dataclass(frozen=True)
class State:
    """What a wrapper takes over from a state dict.

    Attributes:
      num_updates: calls of `perform_slowmo`.
      exchanges: exchanges with peers.
      momentum: anchor and velocity, on the host.
      initial: (N + 1,) float32, the initial parameters, on the host.
      weight: (1,) float32, on the host.
      is_numerator: whether the module's parameters are x and not x / w.
      unexpected: entries that the wrapper has no place for.
    """

    num_updates: int
    exchanges: int
    momentum: SlowMomentum | None
    initial: torch.Tensor | None
    weight: torch.Tensor
    is_numerator: bool
    unexpected: list[str]

    def apply(self, wrapper: Wrapper) -> None:
        """Give it to the wrapper."""
        wrapper.num_updates = self.num_updates
        wrapper._averaging.exchanges = self.exchanges
        wrapper._slow.momentum, wrapper._slow.initial = self.momentum, self.initial
        if wrapper.sgp:
            wrapper._push_sum.weight = self.weight
            wrapper._push_sum.is_numerator = self.is_numerator


def take(
    state_dict: Mapping[str, Any], prefix: str, wrapper: Wrapper
) -> tuple[dict[str, Any], State]:
    """The entries of others, and the wrapper's own, checked; `state_dict` is left alone.

    Raises:
      ValueError: the state of another rank or number of processes; see `parse`.
    """
    own: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for key, value in state_dict.items():
        name = key.removeprefix(prefix)
        mine = key.startswith(prefix) and (name in _FAIRSCALE or name.startswith(_PREFIX))
        (own if mine else others)[name if mine else key] = value
    return others, parse(own, wrapper)


def parse(own: Mapping[str, Any], wrapper: Wrapper) -> State:
    """Check the wrapper's own entries of a state dict, none of which need be there.

    FairScale's dicts hold no counters and no slow momentum: both then start anew.

    Raises:
      ValueError: slow momentum or a push-sum weight of another rank or number of processes, of
        another kind of wrapper, or of another size.
    """
    entries = {k.removeprefix(_PREFIX): v for k, v in own.items() if k.startswith(_PREFIX)}
    weight = torch.as_tensor(own.get("ps_weight", torch.ones(1))).detach().float().reshape(1)
    is_numerator = bool(own.get("is_sgp_ps_numerator", False))
    unexpected = [] if wrapper.sgp else [key for key in _FAIRSCALE if key in own]
    if not wrapper.slowmo:
        unexpected += [_PREFIX + key for key in _SLOW if key in entries]
        entries = {key: value for key, value in entries.items() if key not in _SLOW}
    moved = wrapper.sgp and abs(float(weight) - 1) > _WEIGHT_TOLERANCE
    if moved and not wrapper._push_sum.moves:
        raise ValueError(
            f"`state_dict` holds a push-sum weight of {float(weight):.6g}, but with this `graph` "
            "and `mixing` weights are always 1; it belongs to others."
        )
    _check_place(entries, moved, wrapper)
    return State(
        num_updates=int(entries.get("num_updates", 0)),
        exchanges=int(entries.get("exchanges", 0)),
        momentum=_read_slow(entries, wrapper),
        initial=_copy(entries["initial"]) if "initial" in entries else None,
        weight=weight.cpu().clone(),
        is_numerator=is_numerator,
        unexpected=unexpected,
    )


def _check_place(entries: Mapping[str, Any], moved: bool, wrapper: Wrapper) -> None:
    bound = moved or "anchor" in entries or "initial" in entries
    if not bound or "rank" not in entries:
        return
    saved = int(entries["rank"]), int(entries["world_size"])
    here = wrapper.process_rank, wrapper.process_world_size
    if saved != here:
        raise ValueError(
            f"`state_dict` was saved by rank {saved[0]} of {saved[1]} processes and holds that "
            f"rank's part of the state; this is rank {here[0]} of {here[1]}. Load the dict that "
            "this rank saved, or one that consolidated_state_dict() made, which fits every rank."
        )


def _read_slow(entries: Mapping[str, Any], wrapper: Wrapper) -> SlowMomentum | None:
    if "ends" not in entries:
        return None
    span = wrapper._slow.span(tuple(entries["ends"].tolist()))
    rates = entries["rates"].tolist() or None
    if "anchor" in entries:
        anchor, velocity = entries["anchor"], entries["velocity"]
        if anchor.numel() != span.length:
            raise ValueError(
                f"`state_dict` holds {anchor.numel()} elements of slow momentum, but with "
                f"`slowmo_memory_efficient`={wrapper.slowmo_memory_efficient} this wrapper keeps "
                f"{span.length}; build it with the value that the saved one had, or load a dict "
                "that consolidated_state_dict() made."
            )
    else:
        anchor, velocity = (span.part_of(entries["whole_" + k]) for k in ("anchor", "velocity"))
    return SlowMomentum(span, _copy(anchor), _copy(velocity), rates)


def _slow_entries(slow: SlowMomentum) -> dict[str, Any]:
    rates = torch.tensor(slow.rates or [], dtype=torch.float64)
    return {"ends": torch.tensor(slow.span.ends), "rates": rates}


def _copy(value: torch.Tensor) -> torch.Tensor:
    """On the host; `perform_slowmo` brings it to the device."""
    return value.detach().to("cpu", torch.float32, copy=True)


def _tensor(value: Any) -> torch.Tensor:
    return value.detach() if isinstance(value, torch.Tensor) else torch.tensor(value)
