"""Views share memory: writes through one, to what it is of, and beside it are torch's."""

import pytest
import torch
from torch import nn
from views.differentiated import X, all_read, assert_as_torch

VIEWS = {
    "view": lambda x: x.view(4, 3),
    "reshape": lambda x: x.reshape(2, 6),
    "flatten": lambda x: x.flatten(),
    "ravel": lambda x: x.ravel(),
    "unflatten": lambda x: x.unflatten(1, (2, 2)),
    "transpose": lambda x: x.transpose(0, 1),
    "t": lambda x: x.t(),
    "T": lambda x: x.T,
    "permute": lambda x: x.permute(1, 0),
    "movedim": lambda x: x.movedim(0, 1),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x.narrow(1, 2, 1).squeeze(1),
    "select": lambda x: x.select(1, -1),
    "narrow": lambda x: x.narrow(1, 1, 2),
    "slice": lambda x: x[1:, ::2],
    "integer": lambda x: x[1],
    "integer tensor": lambda x: x[torch.tensor(1)],
    "element": lambda x: x[1, 2],
    "new axis": lambda x: x[:, None, 1:3],
    "diagonal": lambda x: x.diagonal(1),
    "unfold": lambda x: x.unfold(1, 2, 2),
    "as_strided": lambda x: x.as_strided((2, 2), (5, 1), 1),
    "as_strided of a slice": lambda x: x[1].as_strided((2, 2), (2, 1)),
    "view_as": lambda x: x.view_as(torch.zeros(2, 6)),
    "slice from": lambda x: torch.ops.aten.slice(x, 1, 1),
    "slice with a step": lambda x: torch.ops.aten.slice(x, 1, 0, 4, 2),
    "as_strided of detach": lambda x: x.detach()[1:].as_strided((2, 2), (2, 1)),
    "row of expand": lambda x: x.unsqueeze(0).expand(2, 3, 4)[1],
    "detach": lambda x: x.detach(),
    "torch.detach": lambda x: torch.detach(x),
    "data": lambda x: x.data,
    "view of data": lambda x: x.data.view(-1)[2:],
    "to": lambda x: x.to(torch.float32),
    "type_as": lambda x: x.type_as(x),
    "contiguous": lambda x: x.contiguous(),
    "view of a slice": lambda x: x[1:].reshape(-1)[::3],
    "slice of a view": lambda x: x.t()[1:3].t().unsqueeze(1)[:, 0],
    "real": lambda x: torch.view_as_complex(x.view(3, 2, 2)).real,
    # Not contiguous, so that torch copies.
    "reshape of t": lambda x: x.t().reshape(-1),
    "contiguous of t": lambda x: x.t().contiguous(),
    "flatten of a slice": lambda x: x[:, 1:3].flatten(),
    "list as an index": lambda x: x[[0, 2]],
    "mask as an index": lambda x: x[True],
}

# torch refuses to write to these where gradients are recorded.
PARTS_OF_LISTS = {
    "split": lambda x: x.split(3, 1)[1],
    "chunk": lambda x: x.chunk(2, 1)[0],
    "unbind": lambda x: x.unbind(0)[2],
    "iteration": lambda x: list(x)[1],
    "tensor_split": lambda x: torch.tensor_split(x, 3, 1)[0],
    "hsplit": lambda x: x.hsplit(2)[1],
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


@pytest.mark.parametrize("view", VIEWS)
def test_what_is_written_to_a_view_and_read_through_it(view):
    def written(x):
        total = 0.0
        for write in ("mul_", "index", "unrecorded add_", "through data"):
            y = x * 1
            other, part = y.view(-1), VIEWS[view](y)
            WRITES[write](part)
            total = total + all_read(y, other, part)
        # What is viewed is written, and the view is read.
        y = x * 1
        other, part = y.view(-1), VIEWS[view](y)
        y.mul_(x)
        y[1, 2:] = x[0, 0]
        with torch.no_grad():
            y[2].mul_(2.0)
        return total + all_read(y, other, part)

    assert_as_torch(written)


@pytest.mark.parametrize("view", PARTS_OF_LISTS)
def test_what_is_written_to_a_part_of_a_list(view):
    def written(x):
        y = torch.tensor(X)
        other, part = y.view(-1), PARTS_OF_LISTS[view](y)
        part.mul_(2.0)
        y.add_(1.0)
        set_all(part)
        part.sin_()
        return all_read(y, other, part) * x.sum()

    assert_as_torch(written)


def test_kinds_of_writes():
    def written(x):
        total = 0.0
        for number, write in enumerate(WRITES.values()):
            y = x * 1
            other, part = y.view(-1), y.t()[1:]
            write(part)
            total = total + (number + 1) * all_read(y, other, part)
        return total

    assert_as_torch(written)
