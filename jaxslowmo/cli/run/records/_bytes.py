"""Bytes on the wire, step by step, from the report on the step's own programs."""

import math
from typing import Any

import jax

import jaxslowmo as js


class ByteLedger:
    """Bytes that a replica has sent so far.

    The report counts the collectives that the programs emit over the axis "replica", as rings: an
    all-reduce of N bytes between R replicas sends 2 (R - 1) / R N. With several devices per
    replica, what all of them send is added up, for all_reduce also what stays inside the replica
    (its one collective spans both axes). Evaluation on the consensus is not counted. Under
    virtual replicas nothing is sent: the report is of the same programs on a mesh of as many
    devices, so the numbers are those that the run would send there.

    Attributes:
      by_kind: bytes per replica of one step of each kind.
      sent: bytes per replica.
    """

    def __init__(self, by_kind: dict[str, int], sent: int = 0):
        self.by_kind = by_kind
        self.sent = sent

    @classmethod
    def of_step(cls, step: js.TrainStep, state: Any, batch: Any, *, sent: int = 0) -> "ByteLedger":
        """Reads the step's programs without compiling or running them."""
        # Emitted collectives are what the algorithm asks for; compiling every program a second
        # time to read what a backend made of them would cost more than it tells here. The batch as
        # it is: of several processes each has a part, and shapes would be those of the whole.
        programs = step.traced_by_phase(_shapes(state), batch)
        lowered: Any = {kind: traced.lower() for kind, traced in programs.items()}
        if None in lowered:
            lowered = lowered[None]
        mesh = step.mesh if isinstance(step.mesh, jax.sharding.Mesh) else None
        report = js.comm_report_of(lowered, mesh=mesh, compile=False)
        inner = math.prod(size for name, size in step.mesh.shape.items() if name != "replica")
        if "replica" not in report.axes:  # one replica: nobody to talk to
            return cls(dict.fromkeys(report.kinds, 0), sent)
        by_kind = {
            kind: inner * report.wire_bytes(axis="replica", kind=kind) for kind in report.kinds
        }
        return cls(by_kind, sent)

    def add(self, phase: tuple[str, ...]) -> int:
        """Counts one step and returns the bytes so far."""
        self.sent += self._of_phase(set(phase) or {"local"})
        return self.sent

    def _of_phase(self, events: set[str]) -> int:
        if set(self.by_kind) == {"every"}:  # no parameter transform
            return self.by_kind["every"]
        for kind, sent in self.by_kind.items():
            if set(kind.split("+")) == events:
                return sent
        # Events in separate conditionals of one program are no kind of their own; each kind holds
        # what all steps send ("local") and its event's part.
        always = self.by_kind.get("local", 0)
        return always + sum(self._of_event(event) - always for event in events)

    def _of_event(self, event: str) -> int:
        if event in self.by_kind:
            return self.by_kind[event]
        # "any round": which one, only the state tells, since one that was refused comes again.
        return max(sent for kind, sent in self.by_kind.items() if kind.startswith("round "))


def _shapes(tree: Any) -> Any:
    def shape_of(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))

    return jax.tree.map(shape_of, tree)
