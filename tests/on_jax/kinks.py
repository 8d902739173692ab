"""Operations where a derivative has a kink, a tie, a branch or a removable singularity."""

import math

import torch
import torch.nn.functional as F

INF, NAN = math.inf, math.nan
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
EQUAL = torch.ones(2, 3)
SATURATED = torch.tensor([[200.0, -200.0, 0.0], [-200.0, -200.0, 200.0], [0.0, 0.0, 0.0]])
MASKED = torch.tensor([[-INF, 0.0, 1.0], [-INF, -INF, 2.0], [0.0, 0.0, 0.0]])
NO_KEY = torch.tensor([[-INF, -INF, -INF], [0.0, 0.0, -INF]])
REPEATED = torch.tensor([1, 1, 0, 1])
IMAGE = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 2.0, 2.0]).repeat(32).reshape(2, 2, 8, 8)
VOLUME = IMAGE.reshape(1, 2, 4, 4, 8)


def elementwise():
    special = torch.special
    return {
        "abs": torch.abs,
        "sign": torch.sign,
        "sgn": torch.sgn,
        "relu": F.relu,
        "relu6": F.relu6,
        "leaky_relu": F.leaky_relu,
        "leaky_relu of slope -1": lambda x: F.leaky_relu(x, -1.0),
        "elu": F.elu,
        "selu": F.selu,
        "celu": lambda x: F.celu(x, 2.0),
        "gelu": F.gelu,
        "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
        "silu": F.silu,
        "mish": F.mish,
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
        "tanhshrink": F.tanhshrink,
        "softsign": F.softsign,
        "logsigmoid": F.logsigmoid,
        "softplus": F.softplus,
        "softplus of a threshold": lambda x: F.softplus(x, 2.0, 6.0),
        "hardtanh": F.hardtanh,
        "hardswish": F.hardswish,
        "hardsigmoid": F.hardsigmoid,
        "hardshrink": F.hardshrink,
        "softshrink": F.softshrink,
        "threshold": lambda x: F.threshold(x, 0.5, 7.0),
        "clamp": lambda x: x.clamp(-1.0, 1.0),
        "clamp from below": lambda x: x.clamp(min=0.0),
        "clamp from above": lambda x: x.clamp(max=1.0),
        "clamp of crossed bounds": lambda x: x.clamp(1.0, -1.0),
        "clamp by tensors": lambda x: x.clamp(torch.tensor(-1.0), torch.tensor(1.0)),
        "clamp_min": lambda x: torch.clamp_min(x, 0.0),
        "clamp_max": lambda x: torch.clamp_max(x, 0.0),
        "clamp_ in place": lambda x: (x * 1.0).clamp_(-1.0, 1.0),
        "relu_ in place": lambda x: (x * 1.0).relu_(),
        "hardtanh_ in place": lambda x: F.hardtanh(x * 1.0, inplace=True),
        "leaky_relu_ in place": lambda x: F.leaky_relu(x * 1.0, inplace=True),
        "abs_ in place": lambda x: (x * 1.0).abs_(),
        "round": torch.round,
        "round to digits": lambda x: torch.round(x, decimals=1),
        "floor": torch.floor,
        "ceil": torch.ceil,
        "trunc": torch.trunc,
        "frac": torch.frac,
        "nan_to_num": torch.nan_to_num,
        "sinc": torch.sinc,
        "exp": torch.exp,
        "expm1": torch.expm1,
        "exp2": torch.exp2,
        "square": torch.square,
        "sin": torch.sin,
        "atan": torch.atan,
        "asinh": torch.asinh,
        "erf": torch.erf,
        "erfc": torch.erfc,
        "i0": lambda x: torch.i0(x / 10),
        "i0e": special.i0e,
        "i1": lambda x: special.i1(x / 10),
        "i1e": special.i1e,
        "ndtr": special.ndtr,
        "log_ndtr": lambda x: special.log_ndtr(x / 20),
        "heaviside": lambda x: torch.heaviside(x.detach(), torch.tensor(0.5)) + x,
        "deg2rad": torch.deg2rad,
        "power 0": lambda x: x**0,
        "power 0.0": lambda x: x**0.0,
        "power 1": lambda x: x**1,
        "power 2": lambda x: x**2,
        "power 3": lambda x: x**3,
        "of power 2 by 0": lambda x: 2.0**x,
        "of power 0": lambda x: torch.pow(0.0, x.abs()),
        "remainder": lambda x: torch.remainder(x, 3.0),
        "fmod": lambda x: torch.fmod(x, 3.0),
        "where of a log": lambda x: torch.where(x > 0, x.clamp(min=1e-3).log(), 0.0),
        "div by trunc": lambda x: torch.div(x, 3.0, rounding_mode="trunc") + x,
        "div by floor": lambda x: torch.div(x, 3.0, rounding_mode="floor") + x,
        "sign of log": lambda x: (x.abs() + 1).log() * x.sign(),
        "copysign": lambda x: torch.copysign(x, torch.tensor(-1.0)),
        "dropout of none": lambda x: F.dropout(x, 0.0),
        "masked_fill": lambda x: x.masked_fill(x > 0, 0.0),
        "glu": lambda x: F.glu(x, 0),
        "logaddexp": lambda x: torch.logaddexp(x, x.flip(0)),
        "logaddexp of equal": lambda x: torch.logaddexp(x, x),
        "logaddexp2": lambda x: torch.logaddexp2(x, x.flip(0)),
        "logit of a bound": lambda x: torch.logit(x, eps=0.5),
        "norm of scalars": lambda x: x[8].norm() + x,
    }


def positive():
    return {
        "sqrt": torch.sqrt,
        "rsqrt": torch.rsqrt,
        "log": torch.log,
        "log2": torch.log2,
        "log10": torch.log10,
        "log1p": torch.log1p,
        "reciprocal": torch.reciprocal,
        "xlogx": lambda x: torch.xlogy(x, x),
        "entr": torch.special.entr,
        "lgamma": torch.lgamma,
        "digamma": torch.digamma,
        "power 0.5": lambda x: x**0.5,
        "power 1.5": lambda x: x**1.5,
        "acosh": lambda x: torch.acosh(x + 1),
        "i0": torch.i0,
        "igamma": lambda x: torch.igamma(torch.tensor(2.0), x),
        "igammac": lambda x: torch.igammac(torch.tensor(2.0), x),
        "mvlgamma": lambda x: torch.mvlgamma(x + 2, 2),
        "polygamma": lambda x: torch.polygamma(1, x + 0.5),
        "erfcx": torch.special.erfcx,
        "zeta": lambda x: torch.special.zeta(torch.tensor(2.0), x + 1),
    }


def unit():
    return {
        "acos": torch.acos,
        "asin": torch.asin,
        "atanh": torch.atanh,
        "erfinv": torch.erfinv,
        "erfinv_ in place": lambda x: (x * 1.0).erfinv_(),
        "log1p": torch.log1p,
        "logit": lambda x: torch.logit(x.abs()),
        "ndtri": lambda x: torch.special.ndtri(x.abs()),
        "angle": torch.angle,
        "tan": torch.tan,
        "signbit": lambda x: x * torch.signbit(x),
    }


def pairs():
    return {
        "maximum": torch.maximum,
        "minimum": torch.minimum,
        "max of two": torch.max,
        "min of two": torch.min,
        "fmax": torch.fmax,
        "fmin": torch.fmin,
        "atan2": torch.atan2,
        "clamp from below by traced": lambda x, y: x.clamp(min=y),
        "clamp between traced": lambda x, y: x.clamp(y, y + 1),
        "clamp between crossed": lambda x, y: x.clamp(y + 1, y),
        "prelu": lambda x, y: F.prelu(x, y[:1]),
        "l1_loss": lambda x, y: F.l1_loss(x, y, reduction="none"),
        "mse_loss": lambda x, y: F.mse_loss(x, y, reduction="none"),
        "smooth_l1_loss": lambda x, y: F.smooth_l1_loss(x, y, reduction="none"),
        "smooth_l1_loss of beta 2": lambda x, y: F.smooth_l1_loss(x, y, beta=2.0),
        "smooth_l1_loss of beta 0": lambda x, y: F.smooth_l1_loss(x, y, beta=0.0),
        "huber_loss": lambda x, y: F.huber_loss(x, y, reduction="none"),
        "huber_loss of delta 2": lambda x, y: F.huber_loss(x, y, delta=2.0),
        "margin_ranking_loss": lambda x, y: F.margin_ranking_loss(x, y, NONZERO.sign(), 1.0),
        "margin_ranking_loss of margin 0": lambda x, y: F.margin_ranking_loss(x, y, NONZERO.sign()),
        "soft_margin_loss": lambda x, y: F.soft_margin_loss(x * 10, NONZERO.sign()) * y,
        "hinge_embedding_loss": lambda x, y: F.hinge_embedding_loss(x, NONZERO.sign(), 1.0) * y,
        "dist": torch.dist,
        "dist of order 1": lambda x, y: torch.dist(x, y, 1),
        "dist to itself": lambda x, y: torch.dist(x, x) + torch.dist(y, y, 1),
        "where of a quotient": lambda x, y: torch.where(y != 0, x / y, x),
        "copysign": torch.copysign,
        "maximum of rows": lambda x, y: torch.maximum(x.view(4, 3), y[:3]),
        "clamp of rows": lambda x, y: x.view(4, 3).clamp(y[:3], y[:1] + 2),
        "power of rows": lambda x, y: x.view(4, 3).abs() ** y[3:4],
        "lerp": lambda x, y: torch.lerp(x, y, 0.5) + torch.lerp(x, y, x),
        "pairwise_distance": lambda x, y: F.pairwise_distance(x, y, eps=0.0),
        "cosine_similarity": lambda x, y: F.cosine_similarity(x * 0, y, dim=0),
        "kl_div": lambda x, y: F.kl_div(x, y.abs(), reduction="none"),
        "kl_div of logarithms": lambda x, y: F.kl_div(x, y, log_target=True, reduction="none"),
        "poisson_nll_loss": lambda x, y: F.poisson_nll_loss(x, y.abs(), full=True),
        "binary_cross_entropy_with_logits": lambda x, y: F.binary_cross_entropy_with_logits(
            x * 100, y.abs().clamp(max=1.0), reduction="none"
        ),
        "scatter": lambda x, y: x.scatter(0, torch.arange(3, 6), y[:3]),
        "put": lambda x, y: x.put(REPEATED, y[:4], accumulate=True),
        "put_": lambda x, y: (x * 1.0).put_(REPEATED, y[:4], accumulate=True),
        "index_put": lambda x, y: x.index_put((REPEATED,), y[:4], accumulate=True),
        "index_put_": lambda x, y: (x * 1.0).index_put_((REPEATED,), y[:4], accumulate=True),
        "index_add": lambda x, y: x.index_add(0, REPEATED, y[:4], alpha=2.0),
        "index_add_": lambda x, y: (x * 1.0).index_add_(0, REPEATED, y[:4]),
        "scatter_add": lambda x, y: x.scatter_add(0, REPEATED, y[:4]),
        "index_copy": lambda x, y: x.index_copy(0, torch.tensor([2, 0]), y[:2]),
        "index_fill": lambda x, y: x.index_fill(0, REPEATED, 3.0) * y,
        "index_select": lambda x, y: x.index_select(0, REPEATED) * y[:4],
        "take": lambda x, y: x.take(REPEATED) * y[:4],
        "gather": lambda x, y: x.gather(0, REPEATED) * y[:4],
        "index": lambda x, y: x[REPEATED] * y[:4],
        "masked_scatter": lambda x, y: x.masked_scatter(torch.arange(12) % 3 == 0, y),
        "cross": lambda x, y: torch.linalg.cross(x.view(4, 3), y.view(4, 3)),
        "addcdiv": lambda x, y: torch.addcdiv(x, y, NONZERO),
        "triplet_margin_loss": lambda x, y: F.triplet_margin_loss(
            x.view(4, 3), x.view(4, 3), y.view(4, 3), margin=0.5, eps=0.0
        ),
        "cosine_embedding_loss": lambda x, y: F.cosine_embedding_loss(
            x.view(4, 3), y.view(4, 3), torch.tensor([1, -1, 1, -1])
        ),
        "cdist": lambda x, y: torch.cdist(x.view(4, 3), y.view(4, 3)),
        "cdist of order 1": lambda x, y: torch.cdist(x.view(4, 3), y.view(4, 3), p=1.0),
        "cdist of order 3": lambda x, y: torch.cdist(x.view(4, 3), y.view(4, 3), p=3.0),
        "cdist of order 0": lambda x, y: torch.cdist(x.view(4, 3), y.view(4, 3), p=0.0) + x[:4],
        "cdist of order 1.5": lambda x, y: torch.cdist(x.view(4, 3), y.view(4, 3), p=1.5),
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


def quotients():
    return {
        "hypot": torch.hypot,
        "remainder": torch.remainder,
        "fmod": torch.fmod,
        "div": torch.div,
        "div by trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc") + x,
        "div by floor": lambda x, y: torch.div(x, y, rounding_mode="floor") + x,
        "floor_divide": lambda x, y: torch.floor_divide(x.detach(), y.detach()) + x,
    }


def powers():
    return {"pow": torch.pow, "xlogy": torch.xlogy, "xlog1py": torch.special.xlog1py}


def both(function):
    """Values and the positions of a selection."""
    return lambda x: function(x)[0]


def reductions():
    linalg = torch.linalg
    return {
        "max of all": torch.max,
        "min of all": torch.min,
        "median of all": torch.median,
        "nanmedian of all": torch.nanmedian,
        "max": lambda x: x.max(1)[0],
        "max's positions": lambda x: x.max(1)[1] * x[:, 0],
        "min": lambda x: x.min(1)[0],
        "min's positions": lambda x: x.min(1)[1] * x[:, 0],
        "argmax": lambda x: x.argmax(1) * x[:, 0] + x.argmin(1),
        "amax": lambda x: x.amax(1),
        "amax of two axes": lambda x: x.amax((0, 1)),
        "amax of all": lambda x: x.amax(),
        "amin": lambda x: x.amin(1, keepdim=True),
        "amin of the first axis": lambda x: x.amin(0),
        "aminmax": lambda x: sum(x.aminmax(dim=1)),
        "median": lambda x: x.median(1)[0],
        "nanmedian": lambda x: x.nanmedian(1)[0],
        "quantile": lambda x: x.quantile(0.4, 1),
        "nanquantile": lambda x: x.nanquantile(0.5, 1),
        "quantile at the lower": lambda x: x.quantile(0.5, 1, interpolation="lower"),
        "sort": lambda x: x.sort(1)[0],
        "sort downwards": lambda x: x.sort(dim=1, descending=True, stable=True)[0],
        "mode": lambda x: x[:1].mode(0)[0],
        "kthvalue": lambda x: (x + torch.arange(4) / 8).kthvalue(2, 1)[0],
        "topk": lambda x: (x + torch.arange(4) / 8).topk(2, 1)[0],
        "topk of the least": lambda x: (x + torch.arange(4) / 8).topk(2, 1, largest=False)[0],
        "msort": torch.msort,
        "cummax": lambda x: x.cummax(1)[0],
        "cummin": lambda x: x.cummin(1)[0],
        "logcumsumexp": lambda x: x.logcumsumexp(1),
        "logsumexp": lambda x: x.logsumexp(1),
        "norm": lambda x: x.norm(dim=1),
        "renorm": lambda x: x.renorm(2, 0, 1.0),
        "renorm of order 1": lambda x: x.renorm(1, 0, 3.0),
        "diff": lambda x: x.diff(dim=1).abs(),
        "cumsum": lambda x: x.cumsum(1),
        "logsoftmax": lambda x: x.log_softmax(1),
        "max_pool1d": lambda x: F.max_pool1d(x[None], 2, 1),
        "softmin": lambda x: F.softmin(x, 1),
        "nuclear": lambda x: linalg.svdvals(x).sum(),
        "maxout": lambda x: torch.stack([x, x]).max(0).values,
        "pdist": F.pdist,
        "multi_margin_loss": lambda x: F.multi_margin_loss(x, torch.tensor([1, 2, 0]), margin=0.7),
        "multi_margin_loss of order 2": lambda x: F.multi_margin_loss(
            x, torch.tensor([1, 2, 0]), p=2
        ),
        "multilabel_margin_loss": lambda x: F.multilabel_margin_loss(
            x, torch.tensor([[0, 3, -1, 1], [1, -1, 0, 2], [3, 2, 1, 0]])
        ),
        "multilabel_soft_margin_loss": lambda x: F.multilabel_soft_margin_loss(
            x * 100, (TIES > 1).float()
        ),
        "embedding": lambda x: F.embedding(REPEATED, x),
        "embedding_bag": lambda x: F.embedding_bag(REPEATED.view(2, 2), x, mode="max"),
        "embedding_bag of means": lambda x: F.embedding_bag(REPEATED.view(2, 2), x),
    }


def of_zeros():
    norm, vector = torch.linalg.norm, torch.linalg.vector_norm
    return {
        **{
            f"norm of order {order}": lambda x, order=order: vector(x, order, dim=1)
            for order in (-1, 0, 0.5, 1, 1.5, 2, 3, INF, -INF)
        },
        "norm": lambda x: x.norm(dim=1),
        "norm of all": lambda x: x[0].norm() + x[1].norm(1) + x[2].norm(INF),
        "norm of a matrix": lambda x: norm(x[:1]) + norm(x, 1) + norm(x, INF),
        "Frobenius": lambda x: torch.linalg.matrix_norm(x[:1], "fro"),
        "normalize": lambda x: F.normalize(x, dim=1),
        "normalize of order 1": lambda x: F.normalize(x, 1.0, dim=1),
        "cosine_similarity": lambda x: F.cosine_similarity(x, x.flip(0), dim=1),
        "prod of all": torch.prod,
        "prod": lambda x: x.prod(1),
        "prod of a row": lambda x: x.prod(1, keepdim=True),
        "cumprod": lambda x: x.cumprod(1),
        "std": lambda x: x.std(1),
        "var": lambda x: x.var(1),
        "std of all": lambda x: x[0].std(),
        "std without correction": lambda x: x.std(1, unbiased=False),
        "std_mean": lambda x: sum(torch.std_mean(x, 1)),
        "var_mean": lambda x: sum(torch.var_mean(x, 1)),
        "layer_norm": lambda x: F.layer_norm(x, (3,)),
        "rms_norm": lambda x: F.rms_norm(x, (3,)),
        "group_norm": lambda x: F.group_norm(x, 1),
        "local_response_norm": lambda x: F.local_response_norm(x[None, :, :, None], 2),
        "weight_norm": lambda x: torch._weight_norm(x + 1, x[:, :1].abs(), 0),
        "count_nonzero": lambda x: x * x.count_nonzero(1).unsqueeze(1),
        "nansum": lambda x: x.nansum(1) + x.nanmean(1),
        "pdist": F.pdist,
        "pdist of order 1": lambda x: F.pdist(x, 1.0),
        "pdist of infinite order": lambda x: F.pdist(x, INF),
        "cdist to itself": lambda x: torch.cdist(x, x),
        "cdist by products": lambda x: torch.cdist(x, x, 2.0, "use_mm_for_euclid_dist"),
        "lp_pool1d": lambda x: F.lp_pool1d(x[None], 2.0, 2),
        "lp_pool1d of order 1": lambda x: F.lp_pool1d(x[None], 1.0, 2),
        "lp_pool2d": lambda x: F.lp_pool2d(x[None, None], 2.0, 2),
        "complex abs": lambda x: torch.complex(x, x * 2).abs(),
        "complex norm": lambda x: torch.linalg.vector_norm(torch.complex(x, x * 2), dim=1),
        "complex deviation": lambda x: torch.complex(x, x * 2).std(1),
        "complex power": lambda x: (torch.complex(x, x + 1) ** 2).real,
        "complex power of 0": lambda x: (torch.complex(x, x) ** 0).imag + x,
        "complex sinc": lambda x: torch.sinc(torch.complex(x, x * 2)).imag,
        "complex angle": lambda x: torch.complex(x, x * 0 + 1).angle(),
        "abs of a spectrum": lambda x: torch.fft.rfft(x, dim=1).abs(),
        "det": lambda x: torch.linalg.det(x[1:] * 1.0),
        "linear of zeros": lambda x: (F.relu(x @ torch.zeros(3, 3)) + x).abs(),
        "huber of zeros": lambda x: F.huber_loss(x, x),
    }


def attention(mask):
    def call(x):
        heads = x.nan_to_num(neginf=1.0).reshape(1, 1, -1, 3)
        allowed = mask[: heads.shape[2], : heads.shape[2]]
        return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=allowed)

    return call


def masked():
    return {
        "softmax": lambda x: x.softmax(1),
        "log_softmax": lambda x: x.log_softmax(1)[:, 2],
        "logsumexp": lambda x: x.logsumexp(1),
        "logaddexp": lambda x: torch.logaddexp(x[0], x[1]),
        "nan_to_num": torch.nan_to_num,
        "exp": torch.exp,
        "sigmoid": torch.sigmoid,
        "logsigmoid": lambda x: F.logsigmoid(-x),
        "softplus": F.softplus,
        "clamp": lambda x: x.clamp(-1.0, 1.0),
        "max": lambda x: x.max(1)[0],
    }


def without_key():
    return {
        "softmax": lambda x: x.softmax(1),
        "log_softmax": lambda x: x.log_softmax(1)[1:],
        "logsumexp": lambda x: x.logsumexp(1),
        "safe softmax": lambda x: torch._safe_softmax(x, 1),
        "attention": attention(torch.tensor([[False, False], [True, False]])),
        "masked softmax": lambda x: x.softmax(1).nan_to_num(),
    }


def saturated():
    ids = torch.tensor([1, 0, 2])
    return {
        "softmax": lambda x: x.softmax(1),
        "log_softmax": lambda x: x.log_softmax(1),
        "logsumexp": lambda x: x.logsumexp(1),
        "cross_entropy": lambda x: F.cross_entropy(x, ids, reduction="none"),
        "cross_entropy of shares": lambda x: F.cross_entropy(x, x.softmax(1).detach()),
        "cross_entropy smoothed": lambda x: F.cross_entropy(x, ids, label_smoothing=0.1),
        "cross_entropy ignored": lambda x: F.cross_entropy(x, torch.tensor([1, -100, 2])),
        "cross_entropy of none": lambda x: F.cross_entropy(x, torch.tensor([-100, -100, -100])),
        "nll_loss weighted": lambda x: F.nll_loss(x, ids, weight=torch.tensor([0.0, 1.0, 2.0])),
        "binary_cross_entropy of sigmoid": lambda x: F.binary_cross_entropy(
            x.sigmoid(), (x <= 0).float()
        ),
        "log of sigmoid": lambda x: (x.sigmoid() + 1e-8).log(),
        "logsigmoid": F.logsigmoid,
        "tanh": lambda x: torch.tanh(x).atanh().clamp(-3, 3) * 0 + x.tanh(),
        "gumbel": lambda x: (x / 1.0).softmax(1).argmax(1) * x[:, 0],
        "one hot straight through": lambda x: x + (x.round() - x).detach(),
        "DPO": lambda x: -F.logsigmoid(0.1 * (x - x.detach())),
        "IPO": lambda x: (x - x.detach() - 0.5).square(),
        "PPO": lambda x: torch.min((x - x.detach()).exp(), (x - x.detach()).exp().clamp(0.8, 1.2)),
        "PPO of negative advantage": lambda x: torch.max(
            -(x - x.detach()).exp(), -(x - x.detach()).exp().clamp(1.0, 1.2)
        ),
        "KL of itself": lambda x: F.kl_div(x.log_softmax(1), x.softmax(1), reduction="batchmean"),
    }


def probabilities():
    return {
        "binary_cross_entropy": lambda x: F.binary_cross_entropy(x, LABELS, reduction="none"),
        "binary_cross_entropy weighted": lambda x: F.binary_cross_entropy(x, LABELS, LABELS),
        "entropy": lambda x: torch.special.entr(x),
        "xlogy": lambda x: torch.xlogy(LABELS, x),
        "kl_div": lambda x: F.kl_div(x, LABELS, reduction="none"),
        "logit of eps": lambda x: torch.logit(x, 1e-6),
        "logarithm of a clamp": lambda x: x.clamp(1e-7, 1 - 1e-7).log(),
        "focal": lambda x: (1 - x) ** 2 * LABELS,
        "bernoulli": lambda x: torch.distributions.Bernoulli(x).entropy(),
    }


def images():
    pools = {
        f"max_pool2d {name}": lambda x, o=o: F.max_pool2d(x, **o)
        for name, o in {
            "": {"kernel_size": 2},
            "dilated": {"kernel_size": 2, "dilation": 2},
            "dilated, padded": {"kernel_size": 3, "dilation": (2, 1), "padding": 1, "stride": 2},
            "overlapping": {"kernel_size": 3, "stride": 1, "padding": 1},
            "by ceiling": {"kernel_size": 3, "stride": 2, "ceil_mode": True},
            "by ceiling, dilated": {
                "kernel_size": (3, 2), "stride": (2, 3), "ceil_mode": True, "dilation": 2,
                "padding": (1, 1),
            },
            "by ceiling, padded": {"kernel_size": 4, "stride": 4, "ceil_mode": True, "padding": 2},
        }.items()
    }  # fmt: skip
    return {
        **pools,
        "max_pool2d with positions": lambda x: sum(
            F.max_pool2d(x, 3, 2, 1, 2, return_indices=True)
        ),
        "max_pool2d of one image": lambda x: F.max_pool2d(x[0], 3, dilation=2),
        "positions of one image": lambda x: sum(F.max_pool2d(x[0], 2, return_indices=True)),
        "max_pool1d": lambda x: F.max_pool1d(x[0], 2),
        "max_pool1d dilated": lambda x: F.max_pool1d(x[0], 3, 2, 1, 2),
        "max_pool1d dilated, of one": lambda x: F.max_pool1d(x[0, 0], 3, 2, 1, 2, ceil_mode=True),
        "max_pool1d with positions": lambda x: sum(
            F.max_pool1d(x[0], 3, 2, 1, 2, return_indices=True)
        ),
        "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, (3, 5)),
        "avg_pool2d": lambda x: F.avg_pool2d(x, 3, 2, 1, True, False),
        "interpolate": lambda x: F.interpolate(x, scale_factor=1.5),
        "interpolate bilinear": lambda x: F.interpolate(x, size=5, mode="bilinear"),
        "grid_sample": lambda x: F.grid_sample(
            x, x[:, :, :2].permute(0, 2, 3, 1) - 0.5, align_corners=False
        ),
        "reflection": lambda x: F.pad(x, (1, 2, 0, 1), mode="reflect"),
        "replication": lambda x: F.pad(x, (1, 2, 0, 1), mode="replicate"),
        "circular": lambda x: F.pad(x, (1, 2, 0, 1), mode="circular"),
    }


def volumes():
    return {
        "max_pool3d": lambda x: F.max_pool3d(x, 2),
        "max_pool3d dilated": lambda x: F.max_pool3d(x, 2, 1, 1, 2, True),
        "max_pool3d with positions": lambda x: sum(
            F.max_pool3d(x, (2, 1, 3), (1, 2, 2), (1, 0, 1), (2, 1, 1), return_indices=True)
        ),
        "max_pool3d of one": lambda x: F.max_pool3d(x[0], 3, dilation=(1, 1, 2)),
    }


GROUPS = {
    "points": (elementwise, POINTS),
    "positive numbers": (positive, POSITIVE),
    "numbers in [-1, 1]": (unit, UNIT),
    "pairs": (pairs, A, B),
    "quotients": (quotients, A, NONZERO),
    "powers": (powers, BASES, EXPONENTS),
    "ties": (reductions, TIES),
    "zeros": (of_zeros, ZEROS),
    "infinities": (masked, MASKED),
    "no key": (without_key, NO_KEY),
    "saturation": (saturated, SATURATED),
    "probabilities": (probabilities, PROBABILITIES),
    "images": (images, IMAGE),
    "volumes": (volumes, VOLUME),
}

# Operations that need no row: they are linear.
SMOOTH = (
    "_adaptive_avg_pool3d _upsample_bicubic2d_aa _upsample_bilinear2d_aa avg_pool2d avg_pool3d "
    "convolution linear _embedding_bag"  # the last two are composed of others
)
