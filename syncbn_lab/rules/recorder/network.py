"""Rows of products, convolutions, normalizations, losses, activations and indexing."""

from typing import Any, Callable, Dict, Iterator, Tuple

import torch
import torch.nn.functional as F

from syncbn_lab.rules.recorder.operands import ALL, FLOATS, SCALAR, SOME, VECTOR, Row, grid

Call = Callable[..., Any]
Shapes = Tuple[Tuple[int, ...], ...]
_WIDE = (*SOME, "bool")


def _labels(count: int = 2) -> Any:
    return torch.tensor([0, 1, 0, 1][:count])


def _index() -> Any:
    return torch.tensor([0, 1, 2])


_TWO: Dict[str, Tuple[str, Call, Shapes]] = {
    "mm": ("matmul", torch.mm, ((2, 3), (3, 2))),
    "matmul 1d 1d": ("matmul", torch.matmul, ((3,), (3,))),
    "matmul 2d 1d": ("matmul", torch.matmul, ((2, 3), (3,))),
    "matmul 1d 2d": ("matmul", torch.matmul, ((3,), (3, 2))),
    "matmul 2d 2d": ("matmul", lambda a, b: a @ b, ((2, 3), (3, 2))),
    "matmul 3d 1d": ("matmul", torch.matmul, ((2, 2, 3), (3,))),
    "matmul 3d 2d": ("matmul", torch.matmul, ((2, 2, 3), (3, 2))),
    "matmul 3d 3d": ("matmul", torch.matmul, ((2, 2, 3), (2, 3, 2))),
    "bmm": ("matmul", torch.bmm, ((2, 2, 3), (2, 3, 2))),
    "mv": ("matmul", torch.mv, ((2, 3), (3,))),
    "dot": ("matmul", torch.dot, ((3,), (3,))),
    "ger": ("matmul", torch.ger, ((3,), (2,))),
    "tensordot": ("matmul", lambda a, b: torch.tensordot(a, b, 1), ((2, 3), (3, 2))),
    "einsum": ("matmul", lambda a, b: torch.einsum("ij,jk->ik", [a, b]), ((2, 3), (3, 2))),
    "linear 1d": ("matmul", F.linear, ((3,), (4, 3))),
    "linear 2d": ("matmul", F.linear, ((2, 3), (4, 3))),
    "linear 3d": ("matmul", F.linear, ((2, 2, 3), (4, 3))),
    "conv1d": ("conv", F.conv1d, ((1, 2, 5), (3, 2, 3))),
    "conv2d": ("conv", F.conv2d, ((1, 2, 5, 5), (3, 2, 3, 3))),
    "conv3d": ("conv", F.conv3d, ((1, 2, 3, 3, 3), (3, 2, 2, 2, 2))),
    "conv_transpose1d": ("conv", F.conv_transpose1d, ((1, 2, 5), (2, 3, 3))),
    "conv_transpose2d": ("conv", F.conv_transpose2d, ((1, 2, 5, 5), (2, 3, 3, 3))),
    "conv_transpose3d": ("conv", F.conv_transpose3d, ((1, 2, 3, 3, 3), (2, 3, 2, 2, 2))),
    "prelu": ("prelu", F.prelu, ((2, 3, 4), (3,))),
    "prelu one weight": ("prelu", F.prelu, ((2, 3, 4), (1,))),
    "cat": ("cat", lambda a, b: torch.cat([a, b]), (VECTOR, VECTOR)),
    "stack": ("cat", lambda a, b: torch.stack([a, b]), (VECTOR, VECTOR)),
    "group_norm weight": ("layer_norm", lambda x, w: F.group_norm(x, 3, w), ((2, 3, 4), (3,))),
    "group_norm bias": (
        "layer_norm",
        lambda x, b: F.group_norm(x, 3, None, b),
        ((2, 3, 4), (3,)),
    ),
    "layer_norm weight": ("layer_norm", lambda x, w: F.layer_norm(x, (3,), w), ((2, 3), (3,))),
    "cosine_similarity": ("elementwise", F.cosine_similarity, ((2, 3), (2, 3))),
    "pairwise_distance": ("elementwise", F.pairwise_distance, ((2, 3), (2, 3))),
    "grid_sample": ("loss", lambda a, b: F.grid_sample(a, b), ((1, 1, 3, 3), (1, 2, 2, 2))),
}
_THREE: Dict[str, Tuple[str, Call, Shapes]] = {
    "addmm": ("matmul", torch.addmm, ((2, 2), (2, 3), (3, 2))),
    "addmv": ("matmul", torch.addmv, ((2,), (2, 3), (3,))),
    "addr": ("matmul", torch.addr, ((3, 3), (3,), (3,))),
    "addbmm": ("matmul", torch.addbmm, ((2, 2), (2, 2, 3), (2, 3, 2))),
    "baddbmm": ("matmul", torch.baddbmm, ((2, 2, 2), (2, 2, 3), (2, 3, 2))),
    "linear bias 1d": ("matmul", F.linear, ((3,), (4, 3), (4,))),
    "linear bias 2d": ("matmul", F.linear, ((2, 3), (4, 3), (4,))),
    "linear bias 3d": ("matmul", F.linear, ((2, 2, 3), (4, 3), (4,))),
    "bilinear": ("matmul", F.bilinear, ((2, 3), (2, 3), (4, 3, 3))),
    "bilinear bias": (
        "matmul",
        lambda a, w, b: F.bilinear(a, a, w, b),
        ((2, 3), (4, 3, 3), (4,)),
    ),
    "conv1d bias": ("conv", F.conv1d, ((1, 2, 5), (3, 2, 3), (3,))),
    "conv2d bias": ("conv", F.conv2d, ((1, 2, 5, 5), (3, 2, 3, 3), (3,))),
    "conv3d bias": ("conv", F.conv3d, ((1, 2, 3, 3, 3), (3, 2, 2, 2, 2), (3,))),
    "conv_transpose2d bias": ("conv", F.conv_transpose2d, ((1, 2, 5, 5), (2, 3, 3, 3), (3,))),
    "conv_tbc": ("conv", torch.conv_tbc, ((5, 1, 2), (3, 2, 4), (4,))),
    "cat": ("cat", lambda a, b, c: torch.cat([a, b, c]), (VECTOR, VECTOR, VECTOR)),
    "layer_norm": (
        "layer_norm",
        lambda x, w, b: F.layer_norm(x, (3,), w, b),
        ((2, 3), (3,), (3,)),
    ),
    "group_norm": (
        "layer_norm",
        lambda x, w, b: F.group_norm(x, 3, w, b),
        ((2, 3, 4), (3,), (3,)),
    ),
    # input; running statistics; weight and bias
    "batch_norm training": (
        "batch_norm",
        lambda x, s, p: F.batch_norm(x, s, s.clone(), p, p.clone(), True),
        ((2, 3, 4), (3,), (3,)),
    ),
    "batch_norm eval": (
        "batch_norm",
        lambda x, s, p: F.batch_norm(x, s, s.clone(), p, p.clone(), False),
        ((2, 3, 4), (3,), (3,)),
    ),
    "batch_norm no statistics": (
        "batch_norm",
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
        ((2, 3, 4), (3,), (3,)),
    ),
    "batch_norm no parameters": (
        "batch_norm",
        lambda x, mean, var: F.batch_norm(x, mean, var, None, None, True),
        ((2, 3, 4), (3,), (3,)),
    ),
}
_OUT: Dict[str, Tuple[str, Call, Shapes]] = {
    "mm out=": ("matmul", lambda a, b, out: torch.mm(a, b, out=out), ((2, 3), (3, 2), (2, 2))),
    "cat out=": ("cat", lambda a, b, out: torch.cat([a, b], out=out), (VECTOR, VECTOR, (6,))),
}


def products() -> Iterator[Row]:
    """Matrix products, convolutions, sequences and normalizations."""
    for name, (rule, call, shapes) in _TWO.items():
        yield from grid(rule, name, call, (_WIDE, _WIDE), (shapes,))
    for name, (rule, call, shapes) in _THREE.items():
        yield from grid(rule, name, call, (SOME, SOME, SOME), (shapes,))
    for name, (rule, call, shapes) in _OUT.items():
        yield from grid(rule, name, call, (SOME, SOME, SOME), (shapes,), "out=")


def _weighted(function: Call) -> Call:
    return lambda x, weight: function(x, _labels(), weight)


def _asking(x: Any) -> Any:
    """The tensor asking for its gradient, where its dtype can."""
    return x.requires_grad_() if x.is_floating_point() else x


_LOSSES: Dict[str, Tuple[Call, Shapes]] = {
    "mse_loss": (F.mse_loss, (VECTOR, VECTOR)),
    "l1_loss": (F.l1_loss, (VECTOR, VECTOR)),
    "smooth_l1_loss": (F.smooth_l1_loss, (VECTOR, VECTOR)),
    "soft_margin_loss": (F.soft_margin_loss, (VECTOR, VECTOR)),
    "mse_loss, target requiring grad": (lambda a, b: F.mse_loss(a, _asking(b)), (VECTOR, VECTOR)),
    "l1_loss, target requiring grad": (lambda a, b: F.l1_loss(a, _asking(b)), (VECTOR, VECTOR)),
    "smooth_l1_loss, target requiring grad": (
        lambda a, b: F.smooth_l1_loss(a, _asking(b)),
        (VECTOR, VECTOR),
    ),
    "kl_div": (lambda a, b: F.kl_div(a, b, reduction="sum"), (VECTOR, VECTOR)),
    "poisson_nll_loss": (F.poisson_nll_loss, (VECTOR, VECTOR)),
    "hinge_embedding_loss": (F.hinge_embedding_loss, (VECTOR, VECTOR)),
    "margin_ranking_loss": (lambda a, b: F.margin_ranking_loss(a, a, b), (VECTOR, VECTOR)),
    "cosine_embedding_loss": (
        lambda a, b: F.cosine_embedding_loss(a, a.clone(), b),
        ((2, 3), (2,)),
    ),
    "multilabel_soft_margin_loss": (F.multilabel_soft_margin_loss, ((2, 3), (2, 3))),
    "binary_cross_entropy": (F.binary_cross_entropy, (VECTOR, VECTOR)),
    "binary_cross_entropy_with_logits": (F.binary_cross_entropy_with_logits, (VECTOR, VECTOR)),
    "nll_loss weight=": (_weighted(F.nll_loss), ((2, 3), (3,))),
    "cross_entropy weight=": (_weighted(F.cross_entropy), ((2, 3), (3,))),
    "multi_margin_loss weight=": (
        lambda x, w: F.multi_margin_loss(x, _labels(), weight=w),
        ((2, 3), (3,)),
    ),
}
_LOSSES_OF_THREE: Dict[str, Tuple[Call, Shapes]] = {
    "binary_cross_entropy weight=": (F.binary_cross_entropy, (VECTOR,) * 3),
    "binary_cross_entropy_with_logits weight=": (
        F.binary_cross_entropy_with_logits,
        (VECTOR,) * 3,
    ),
    "binary_cross_entropy_with_logits pos_weight=": (
        lambda x, t, p: F.binary_cross_entropy_with_logits(x, t, pos_weight=p),
        (VECTOR,) * 3,
    ),
    "triplet_margin_loss": (F.triplet_margin_loss, ((2, 3),) * 3),
}


def _lengths(x: Any) -> Any:
    lengths: Any = ((3,), (2,))  # numbers: tensors of them are refused by the rules (torch12.py)
    return F.ctc_loss(x, torch.tensor([[1, 2]]), *lengths)


_ONE: Dict[str, Tuple[Call, Tuple[int, ...]]] = {
    "nll_loss": (lambda x: F.nll_loss(x, _labels()), (2, 3)),
    "cross_entropy": (lambda x: F.cross_entropy(x, _labels()), (2, 3)),
    "multilabel_margin_loss": (
        lambda x: F.multilabel_margin_loss(x, torch.tensor([0, 1, -1])),
        (3,),
    ),
    "ctc_loss": (_lengths, (3, 1, 4)),
    "softmax": (lambda x: F.softmax(x, 0), (3,)),
    "softmin": (lambda x: F.softmin(x, 0), (3,)),
    "log_softmax": (lambda x: F.log_softmax(x, 0), (3,)),
    "softplus": (F.softplus, (3,)),
    "gelu": (F.gelu, (3,)),
    "relu": (F.relu, (3,)),
    "relu6": (F.relu6, (3,)),
    "leaky_relu": (F.leaky_relu, (3,)),
    "elu": (F.elu, (3,)),
    "selu": (F.selu, (3,)),
    "hardtanh": (F.hardtanh, (3,)),
    "logsigmoid": (F.logsigmoid, (3,)),
    "softsign": (F.softsign, (3,)),
    "normalize": (lambda x: F.normalize(x, dim=0), (3,)),
    "local_response_norm": (lambda x: F.local_response_norm(x, 2), (1, 3, 4)),
    "instance_norm": (F.instance_norm, (2, 3, 4)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), (1, 1, 4, 4)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), (1, 1, 4, 4)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 1), (1, 1, 4, 4)),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2), (1, 1, 2, 2)),
    "pad": (lambda x: F.pad(x, (1, 1)), (3,)),
    "dropout p=0": (lambda x: F.dropout(x, 0.0), (3,)),
}


def losses() -> Iterator[Row]:
    """Losses, activations and pooling."""
    for name, (call, shapes) in _LOSSES.items():
        yield from grid("loss", name, call, (_WIDE, _WIDE), (shapes,), first=0.25, step=0.25)
    for name, (call, shapes) in _LOSSES_OF_THREE.items():
        yield from grid("loss", name, call, (SOME, SOME, SOME), (shapes,), first=0.25, step=0.25)
    for name, (call, shape) in _ONE.items():
        yield from grid("floating-only", "F." + name, call, (ALL,), ((shape,),))


_WRITES: Dict[str, Call] = {
    "__setitem__ slice": lambda a, b: (a.__setitem__(slice(0, 3), b), a)[1],
    "__setitem__ mask": lambda a, b: (a.__setitem__(torch.tensor([True, True, True]), b), a)[1],
    "__setitem__ index": lambda a, b: (a.__setitem__(_index(), b), a)[1],
    "index_put_": lambda a, b: a.index_put_((_index(),), b),
    "index_add_": lambda a, b: a.index_add_(0, _index(), b),
    "index_copy_": lambda a, b: a.index_copy_(0, _index(), b),
    "scatter_": lambda a, b: a.scatter_(0, _index(), b),
    "scatter_add_": lambda a, b: a.scatter_add_(0, _index(), b),
    "masked_scatter_": lambda a, b: a.masked_scatter_(torch.tensor([True, True, True]), b),
    "put_": lambda a, b: a.put_(_index(), b),
}
_WRITES_ONE: Dict[str, Call] = {
    "__setitem__ slice": _WRITES["__setitem__ slice"],
    "__setitem__ index": _WRITES["__setitem__ index"],
    "index_put_": _WRITES["index_put_"],
    "index_fill_": lambda a, b: a.index_fill_(0, _index(), b),
    "masked_fill_": lambda a, b: a.masked_fill_(torch.tensor([True, False, True]), b),
    "masked_fill": lambda a, b: a.masked_fill(torch.tensor([True, False, True]), b),
}
_READS: Dict[str, Call] = {
    "gather": lambda a, i: a.gather(0, i),
    "index_select": lambda a, i: a.index_select(0, i),
    "__getitem__": lambda a, i: a[i],
    "take": lambda a, i: a.take(i),
}


def indexing() -> Iterator[Row]:
    """Values written and read by index."""
    for name, call in _WRITES.items():
        yield from grid("index", name, call, (_WIDE, _WIDE), form="in place")
    for name, call in _WRITES_ONE.items():
        form = "out of place" if name == "masked_fill" else "in place"
        yield from grid("index", name, call, (_WIDE, _WIDE), ((VECTOR, SCALAR),), form)
    for name, call in _READS.items():
        whole = ("int64", "int32", "uint8", "bool", "float32")
        yield from grid("index", name, call, (FLOATS, whole), first=0.0)
