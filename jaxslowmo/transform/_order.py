"""The order of a chain, read off its state: parameter transforms come last."""

from collections import OrderedDict
from typing import NamedTuple

import jax
import optax

from .._typing import PyTree
from ._registry import holds_state


class NoExchangeState(NamedTuple):
    """State of `no_exchange`: unlike `optax.EmptyState`, which steps of optimizers have, too."""


def no_exchange() -> optax.GradientTransformation:
    """What stands in the place of a parameter transform where there is none."""
    return optax.GradientTransformation(
        lambda params: NoExchangeState(), lambda updates, state, params=None: (updates, state)
    )


def check_order(owner: str, state: PyTree) -> None:
    """Raise `ValueError` for a chain in which something follows a parameter transform.

    A parameter transform returns the update that lands on the new parameters. What comes after
    would take that for a step of the optimizer, such as a rate by which to scale it.

    Args:
      owner: who was given the chain, for the message.
      state: of any optax transform. Chains are looked at wherever they are in it.
    """
    for chain in _chains(state):
        members = [
            (name, x, holds_state(x, "parameters"))
            for name, x in _members(chain)
            if not isinstance(x, NoExchangeState)
        ]
        moves = [is_moving for *_, is_moving in members]
        if moves != sorted(moves):
            first = moves.index(True)
            name, late = next((n, x) for n, x, m in members[first:] if not m)
            raise ValueError(
                f"{owner}: `tx` is a chain in which something follows a parameter transform, "
                f"which must come last: after {members[first][0]}, "
                f"{type(members[first][1]).__name__}, stands {name}, {type(late).__name__}. What "
                "it does to an update would be done to the way to the synchronised parameters, and "
                "replicas would drift apart: put it before."
            )
        for _, member, _ in members:
            check_order(owner, member)


def _is_chain(x: PyTree) -> bool:
    return type(x) is tuple or isinstance(x, OrderedDict)  # `optax.chain`, `optax.named_chain`


def _chains(state: PyTree) -> list[PyTree]:
    """The outermost chains in `state`."""
    return [x for x in jax.tree.leaves(state, is_leaf=_is_chain) if _is_chain(x)]


def _members(chain: PyTree, name: str = "") -> list[tuple[str, PyTree]]:
    """The states of a chain, and of chains in it, as their transforms run, and where they stand."""
    pairs = chain.items() if isinstance(chain, OrderedDict) else enumerate(chain)
    return [
        member
        for key, x in pairs
        for member in (
            _members(x, f"{name}[{key!r}]") if _is_chain(x) else [(f"{name}[{key!r}]", x)]
        )
    ]
