"""Views share memory: writes through one, to what it is of, and beside it are torch's."""

import itertools

import torch
from torch import nn
from views.differentiated import all_read, assert_as_torch

VIEWS = {
    "view": lambda x: x.view(4, 3),
    "unflatten": lambda x: x.unflatten(1, (2, 2)),
    "transpose": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.permute(1, 0),
    "squeeze": lambda x: x.narrow(1, 2, 1).squeeze(1),
    "select": lambda x: x.select(1, -1),
    "slice": lambda x: x[1:, ::2],
    "integer tensor": lambda x: x[torch.tensor(1)],
    "new axis": lambda x: x[:, None, 1:3],
    "diagonal": lambda x: x.diagonal(1),
    "unfold": lambda x: x.unfold(1, 2, 2),
    "as_strided": lambda x: x.as_strided((2, 2), (5, 1), 1),
    "as_strided of a slice": lambda x: x[1].as_strided((2, 2), (2, 1)),
    "slice with a step": lambda x: torch.ops.aten.slice(x, 1, 0, 4, 2),
    "as_strided of detach": lambda x: x.detach()[1:].as_strided((2, 2), (2, 1)),
    "row of expand": lambda x: x.unsqueeze(0).expand(2, 3, 4)[1],
    "detach": lambda x: x.detach(),
    "torch.detach": lambda x: torch.detach(x),
    "data": lambda x: x.data,
    "type_as": lambda x: x.type_as(x),
    "view of a slice": lambda x: x[1:].reshape(-1)[::3],
    "slice of a view": lambda x: x.t()[1:3].t().unsqueeze(1)[:, 0],
    "real": lambda x: torch.view_as_complex(x.view(3, 2, 2)).real,
    # Not contiguous, so that torch copies.
    "reshape of t": lambda x: x.t().reshape(-1),
    "contiguous of t": lambda x: x.t().contiguous(),
    "list as an index": lambda x: x[[0, 2]],
    "mask as an index": lambda x: x[True],
}


def set_all(v):
    v[...] = 0.7


def unrecorded(write):
    def wrapped(v):
        with torch.no_grad():
            write(v)

    return wrapped


WRITES = {
    "mul_": lambda v: v.mul_(2.0),
    "add_": lambda v: v.add_(v.clone() * 0.5),
    "zero_": lambda v: v.zero_(),
    "fill_": lambda v: v.fill_(3.0),
    "index": set_all,
    "copy_": lambda v: v.copy_(v.detach() * 3),
    "copy_ of a number": lambda v: v.copy_(torch.tensor(0.5)),
    "masked_fill_": lambda v: v.masked_fill_(v > 1, 0.5),
    "sin_": lambda v: v.sin_(),
    "unrecorded add_": unrecorded(lambda v: v.add_(3.0)),
    "unrecorded index": unrecorded(set_all),
    "unrecorded out": unrecorded(lambda v: torch.mul(v.clone(), 2.0, out=v)),
    "init": lambda v: nn.init.constant_(v, 2.0),
    "through data": lambda v: v.data.mul_(2.0),
    "through detach": lambda v: v.detach().mul_(2.0),
}


def test_what_is_written_to_a_view_and_read_through_it():
    kinds = itertools.cycle(WRITES.values())

    def written(x, view, write):
        y = x * 1
        other, part = y.view(-1), view(y)
        write(part)
        total = all_read(y, other, part)
        # What is viewed is written, and the view is read.
        y = x * 1
        other, part = y.view(-1), view(y)
        y.mul_(x)
        y[1, 2:] = x[0, 0]
        with torch.no_grad():
            y[2].mul_(2.0)
        return total + all_read(y, other, part)

    each = {name: (view, next(kinds)) for name, view in VIEWS.items()}
    assert_as_torch({name: lambda x, pair=pair: written(x, *pair) for name, pair in each.items()})
