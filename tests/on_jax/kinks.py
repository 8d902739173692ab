"""Operations where a derivative has a kink, a tie, a branch or a removable singularity."""

import functools
import math

import torch
import torch.nn.functional as F

INF = math.inf
# Every float here is a point at which some function below has a kink.
SIZES = [0.0, 0.5, 1.0, 3.0, 6.0, 20.0, 88.0, 100.0, 200.0]
POINTS = torch.tensor([*SIZES, *(-size for size in SIZES)])
UNIT = torch.tensor([-1.0, -0.5, -0.0, 0.0, 0.5, 1.0])
POSITIVE = torch.tensor([0.0, 1e-30, 0.5, 1.0, 2.0, 100.0])
PROBABILITIES = torch.tensor([0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0, 1e-30])
LABELS = torch.tensor([0.0, 0.5, 1.0, 0.5, 0.0, 0.5, 1.0, 1.0])
A = torch.tensor([-2.0, -1.0, -1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 2.0, 0.0, -0.0, 3.0])
B = torch.tensor([-1.0, -1.0, 1.0, 0.0, 1.0, -1.0, 0.0, 1.0, 2.0, 2.0, 0.0, -2.0])
NONZERO = torch.tensor([-1.0, -1.0, 1.0, 0.5, 1.0, -1.0, -3.0, 1.0, 2.0, 2.0, 0.5, -2.0])
BASES = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 2.0, -2.0, -2.0, 1e-30, 0.0])
EXPONENTS = torch.tensor([0.0, 1.0, 2.0, 0.5, 0.0, 0.0, 2.0, 3.0, 0.0, 3.0])
TIES = torch.tensor([[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0], [0.0, -1.0, -1.0, 5.0]])
ZEROS = torch.tensor([[0.0, 0.0, 0.0], [0.0, 2.0, 3.0], [1.0, 0.0, 0.0], [1.0, -2.0, 3.0]])
SATURATED = torch.tensor([[200.0, -200.0, 0.0], [-200.0, -200.0, 200.0], [0.0, 0.0, 0.0]])
NO_KEY = torch.tensor([[-INF, -INF, -INF], [0.0, 0.0, -INF]])
REPEATED = torch.tensor([1, 1, 0, 1])
IMAGE = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 2.0, 2.0]).repeat(32).reshape(2, 2, 8, 8)
VOLUME = IMAGE.reshape(1, 2, 4, 4, 8)


def of(module, names):
    """Functions of one or two tensors, by their names."""
    return {name: getattr(module, name) for name in names.split()}


def along_rows(names):
    """Functions of a matrix and an axis; of those that return positions, too, the values."""

    def call(x, name):
        y = getattr(torch, name)(x, 1)
        return y if isinstance(y, torch.Tensor) else y[0]

    return {f"{name} of rows": functools.partial(call, name=name) for name in names.split()}


def elementwise():
    return {
        **of(torch, "abs sign sgn sigmoid tanh round floor ceil trunc frac nan_to_num sinc square"),
        **of(torch, "exp expm1 exp2 sin atan asinh erf erfc deg2rad"),
        **of(F, "relu relu6 leaky_relu elu selu gelu silu mish tanhshrink softsign logsigmoid"),
        **of(F, "softplus hardtanh hardswish hardsigmoid hardshrink softshrink"),
        **of(torch.special, "i0e i1e ndtr"),
        "leaky_relu of slope -1": lambda x: F.leaky_relu(x, -1.0),
        "celu": lambda x: F.celu(x, 2.0),
        "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
        "threshold": lambda x: F.threshold(x, 0.5, 7.0),
        "clamp from below": lambda x: x.clamp(min=0.0) + torch.clamp_min(x, 0.0),
        "clamp of crossed bounds": lambda x: x.clamp(1.0, -1.0),
        "in place": lambda x: (x * 1.0).relu_() + (x * 1.0).clamp_(-1.0, 1.0) + (x * 1.0).abs_(),
        "i0, i1": lambda x: torch.i0(x / 10) + torch.special.i1(x / 10),
        "log_ndtr": lambda x: torch.special.log_ndtr(x / 20),
        "power 0": lambda x: x**0 + x**0.0,
        "remainder": lambda x: torch.remainder(x, 3.0) + torch.fmod(x, 3.0),
        "glu": lambda x: F.glu(x, 0),
        "logaddexp": lambda x: torch.logaddexp(x, x.flip(0)),
        "logit of a bound": lambda x: torch.logit(x, eps=0.5),
    }


def positive():
    two = torch.tensor(2.0)
    return {
        **of(torch, "sqrt rsqrt log log2 log10 log1p reciprocal lgamma digamma i0"),
        **of(torch.special, "entr erfcx"),
        "xlogx": lambda x: torch.xlogy(x, x),
        "power 0.5": lambda x: x**0.5,
        "igamma": lambda x: torch.igamma(two, x),
        "zeta": lambda x: torch.special.zeta(two, x + 1),
    }


def unit():
    return {
        **of(torch, "acos asin atanh erfinv log1p angle tan"),
        "logit": lambda x: torch.logit(x.abs()),
        "ndtri": lambda x: torch.special.ndtri(x.abs()),
    }


def pairs():
    def rows(function):
        return lambda x, y: function(x.view(4, 3), y.view(4, 3))

    return {
        **of(torch, "maximum minimum max min fmax fmin atan2 copysign dist"),
        **of(F, "smooth_l1_loss"),
        "clamp between traced": lambda x, y: x.clamp(y, y + 1),
        "prelu": lambda x, y: F.prelu(x, y[:1]),
        "soft_margin_loss": lambda x, y: F.soft_margin_loss(x * 10, NONZERO.sign()) * y,
        "dist to itself": lambda x, y: torch.dist(x, x) + torch.dist(y, y, 1),
        "binary_cross_entropy_with_logits": lambda x, y: F.binary_cross_entropy_with_logits(
            x * 100, y.abs().clamp(max=1.0), reduction="none"
        ),
        **{
            f"cdist of order {p}": rows(functools.partial(torch.cdist, p=p))
            for p in (1.0, 1.5, 2.0, 3.0)
        },
        **{
            f"scatter_reduce {reduce}{'' if own else ' without itself'}": (
                lambda x, y, reduce=reduce, own=own: x.scatter_reduce(
                    0, REPEATED, y[:4], reduce, include_self=own
                )
            )
            for reduce in ("sum", "mean", "amax", "amin")
            for own in (True, False)
        },
    }


def powers():
    return {"pow": torch.pow, "xlogy": torch.xlogy, "xlog1py": torch.special.xlog1py}


def reductions():
    ids, three = torch.tensor([1, 2, 0]), torch.arange(4) / 8
    return {
        **of(torch, "max min median nanmedian amax msort"),
        **along_rows("max min amax amin median nanmedian sort cummax cummin cumsum log_softmax"),
        **along_rows("logcumsumexp logsumexp"),
        "positions": lambda x: (x.max(1)[1] + x.argmax(1)) * x[:, 0] + x.argmin(1),
        "aminmax": lambda x: sum(x.aminmax(dim=1)),
        "quantile": lambda x: x.quantile(0.4, 1) + x.nanquantile(0.5, 1),
        "kthvalue": lambda x: (x + three).kthvalue(2, 1)[0],
        "topk": lambda x: (x + three).topk(2, 1)[0] + (x + three).topk(2, 1, largest=False)[0],
        "pdist": F.pdist,
        "multi_margin_loss": lambda x: F.multi_margin_loss(x, ids, margin=0.7),
        "multilabel_margin_loss": lambda x: F.multilabel_margin_loss(
            x, torch.tensor([[0, 3, -1, 1], [1, -1, 0, 2], [3, 2, 1, 0]])
        ),
    }


def of_zeros():
    vector = torch.linalg.vector_norm
    return {
        **{
            f"norm of order {order}": lambda x, order=order: vector(x, order, dim=1)
            for order in (-1, 0, 0.5, 1, 1.5, 2, 3, INF, -INF)
        },
        **along_rows("prod cumprod std var std_mean var_mean nansum"),
        "norm of all": lambda x: x[0].norm() + x[1].norm(1) + x[2].norm(INF),
        "pdist": lambda x: F.pdist(x) + F.pdist(x, 1.0),
        "cdist to itself": lambda x: torch.cdist(x, x),
        "cdist by products": lambda x: torch.cdist(x, x, 2.0, "use_mm_for_euclid_dist"),
        "complex abs": lambda x: torch.complex(x, x * 2).abs(),
        "complex angle": lambda x: torch.complex(x, x * 0 + 1).angle(),
    }


def attention(x):
    """Of rows of which the first has no key."""
    heads = x.nan_to_num(neginf=1.0).reshape(1, 1, -1, 3)
    mask = torch.tensor([[False, False], [True, False]])
    return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)


def without_key():
    return {
        **along_rows("softmax logsumexp _safe_softmax"),
        "log_softmax": lambda x: x.log_softmax(1)[1:],
        "attention": attention,
    }


def saturated():
    ids, bce = torch.tensor([1, 0, 2]), F.binary_cross_entropy
    return {
        **along_rows("softmax log_softmax logsumexp"),
        **of(F, "logsigmoid tanh"),
        "cross_entropy": lambda x: F.cross_entropy(x, ids, reduction="none"),
        "cross_entropy of none": lambda x: F.cross_entropy(x, torch.tensor([-100, -100, -100])),
        "nll_loss weighted": lambda x: F.nll_loss(x, ids, weight=torch.tensor([0.0, 1.0, 2.0])),
        "binary_cross_entropy of sigmoid": lambda x: bce(x.sigmoid(), (x <= 0).float()),
    }


def probabilities():
    return {
        "binary_cross_entropy": lambda x: F.binary_cross_entropy(x, LABELS, reduction="none"),
        "xlogy": lambda x: torch.xlogy(LABELS, x),
        "kl_div": lambda x: F.kl_div(x, LABELS, reduction="none"),
    }


def images():
    dilated = {"kernel_size": 3, "dilation": (2, 1), "padding": 1, "stride": 2}
    options = {
        "plain": {"kernel_size": 2},
        "dilated": dilated,
        "by ceiling, dilated": {
            "kernel_size": (3, 2),
            "stride": (2, 3),
            "ceil_mode": True,
            "dilation": 2,
            "padding": (1, 1),
        },
    }
    return {
        **{f"max_pool2d {n}": functools.partial(F.max_pool2d, **o) for n, o in options.items()},
        "with positions": lambda x: sum(F.max_pool2d(x, **dilated, return_indices=True)),
    }


def volumes():
    return {
        "max_pool3d with positions": lambda x: sum(
            F.max_pool3d(x, (2, 1, 3), (1, 2, 2), (1, 0, 1), (2, 1, 1), return_indices=True)
        ),
    }


GROUPS = {
    "points": (elementwise, POINTS),
    "positive numbers": (positive, POSITIVE),
    "numbers in [-1, 1]": (unit, UNIT),
    "pairs": (pairs, A, B),
    "powers": (powers, BASES, EXPONENTS),
    "ties": (reductions, TIES),
    "zeros": (of_zeros, ZEROS),
    "no key": (without_key, NO_KEY),
    "saturation": (saturated, SATURATED),
    "probabilities": (probabilities, PROBABILITIES),
    "images": (images, IMAGE),
    "volumes": (volumes, VOLUME),
}
