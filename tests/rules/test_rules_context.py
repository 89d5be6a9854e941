"""The context manager itself: what it records, what it leaves behind, what it composes with."""

from __future__ import annotations

import contextlib
import pickle
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import BackwardCFunction

from syncbn_lab.errors import InputError
from syncbn_lab.rules import Torch12RuleError, describe_rules, torch12_rules
from syncbn_lab.rules.table import TABLE

HALF, FLOAT = torch.ones(3, dtype=torch.half), torch.ones(3)
MIXED_SUM = "expected device cpu and dtype Float but got device cpu and dtype Half"


class CastsItsGradient(torch.autograd.Function):
    """Like the reported layer: half in, float32 gradient out."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad.float()


def backward_through_cast():
    x = torch.ones(2, 3, dtype=torch.half, requires_grad=True)
    CastsItsGradient.apply(x).sum().backward()
    return x.grad


def state() -> tuple:
    """Everything that could stay patched."""
    return (
        BackwardCFunction.apply,
        BackwardCFunction.__dict__["apply"],
        torch.Tensor.grad,
        torch.Tensor.backward,
        torch.autograd.backward,
        torch.nn.functional.conv2d,
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        (HALF + FLOAT).dtype,
        backward_through_cast().dtype,
    )


@pytest.mark.parametrize("mode", ["raise", "record"])
@pytest.mark.parametrize("how", ["clean", "body raises", "forward violates", "backward violates"])
def test_nothing_stays_patched(mode, how):
    before = state()
    with contextlib.suppress(RuntimeError, ZeroDivisionError), torch12_rules(on_violation=mode):
        assert BackwardCFunction.apply is not before[0]
        if how == "body raises":
            raise ZeroDivisionError
        if how == "forward violates":
            HALF + FLOAT
        if how == "backward violates":
            backward_through_cast()
    assert state() == before


def test_an_error_says_what_and_where_and_that_it_is_ours():
    with torch12_rules(), pytest.raises(Torch12RuleError) as caught:
        torch.add(FLOAT, HALF)
    violation = caught.value.violation
    assert str(caught.value) == violation.message == MIXED_SUM
    assert (violation.rule, violation.operation) == ("elementwise", "add")
    assert violation.operands == (("float32", "cpu", (3,)), ("float16", "cpu", (3,)))
    assert (violation.expected, violation.got) == ("float32", "float16")
    assert violation.result_dtype == "float32"
    assert violation.phase == "forward"
    assert violation.numel == 3
    assert Path(violation.file).name == "test_rules_context.py"
    assert "torch.add(FLOAT, HALF)" in Path(__file__).read_text().splitlines()[violation.line - 1]
    (note,) = caught.value.__notes__
    assert note.startswith("raised by syncbn_lab's torch 1.2 rules on torch ")
    assert "rule: elementwise; basis: recorded in torch 1.2.0 on a CPU" in note


def test_record_changes_nothing_and_notes_everything_in_order():
    with torch12_rules(on_violation="record") as rules:
        total = HALF + FLOAT
        product = torch.tensor([1, 2]) * 2.5  # torch 1.2 allowed it, as int64: no violation
        below = FLOAT < HALF
        gradient = backward_through_cast()
    assert (total.dtype, below.dtype) == (torch.float32, torch.bool)
    assert product.dtype == torch.float32  # today's result
    assert gradient.dtype == torch.half
    noted = [(v.rule, v.operation, v.result_dtype, v.phase) for v in rules.violations]
    assert noted == [
        ("elementwise", "add", "float32", "forward"),
        ("comparison", "lt", "bool", "forward"),
        ("gradient", "CastsItsGradientBackward", "float16", "backward"),
    ]
    cast = rules.violations[-1]
    assert (cast.expected, cast.got, cast.gradient_index) == ("float16", "float32", 0)
    assert cast.operands == (("float32", "cpu", (2, 3)),)
    assert cast.numel == 6


def test_record_notes_the_engines_cast_of_a_built_in_node_and_of_a_root():
    x, scale = (
        torch.ones(3, requires_grad=True),
        torch.ones((), dtype=torch.double).requires_grad_(),
    )
    with torch12_rules(on_violation="record") as rules:
        (x * scale).backward(torch.ones(3, dtype=torch.double))
    assert [(v.operation, v.gradient_index, v.numel) for v in rules.violations] == [
        ("backward", 0, 3),
        ("MulBackward0", 1, 1),
    ]
    assert {v.phase for v in rules.violations} == {"backward"}


@pytest.mark.parametrize("operation", [lambda: F.conv2d(*conv()), lambda: F.l1_loss(HALF, FLOAT)])
def test_one_violation_is_noted_once(operation):
    """Both modes see these operations."""
    with torch12_rules(on_violation="record") as rules, contextlib.suppress(RuntimeError):
        operation()
    assert len(rules.violations) == 1


def conv():
    return torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3), torch.ones(1, dtype=torch.half)


def test_nested():
    # record in record: each notes it once
    with torch12_rules(on_violation="record") as outer:
        with torch12_rules(on_violation="record") as inner:
            HALF + FLOAT
            backward_through_cast()
        HALF + FLOAT
    assert (len(inner.violations), len(outer.violations)) == (2, 3)
    # the inner one raises before the outer one sees anything
    with torch12_rules(on_violation="record") as outer:
        with torch12_rules() as inner, pytest.raises(Torch12RuleError):
            HALF + FLOAT
        HALF + FLOAT
    assert (len(inner.violations), len(outer.violations)) == (1, 1)
    # raise in raise: once
    with torch12_rules() as outer, torch12_rules() as inner, pytest.raises(Torch12RuleError):
        HALF + FLOAT
    assert (len(inner.violations), len(outer.violations)) == (1, 0)
    # the outer one raises through the inner recorder
    with torch12_rules(), torch12_rules(on_violation="record"), pytest.raises(Torch12RuleError):
        HALF + FLOAT


def test_other_threads_are_left_alone():
    results = []
    with torch12_rules():
        thread = threading.Thread(target=lambda: results.append(backward_through_cast().dtype))
        thread.start()
        thread.join()
    assert results == [torch.half]


def test_a_violation_inside_a_functions_backward():
    class MixesInBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * HALF

    x = torch.ones(3, requires_grad=True)
    with torch12_rules() as rules, pytest.raises(Torch12RuleError, match=MIXED_SUM):
        MixesInBackward.apply(x).sum().backward()
    assert rules.violations[0].phase == "backward"


def test_function_mode_is_in_force_inside_backward():
    class ConvolvesInBackward(CastsItsGradient):
        @staticmethod
        def backward(ctx, grad):
            F.conv2d(*conv())
            return grad

    x = torch.ones(3, requires_grad=True)
    with torch12_rules(), pytest.raises(Torch12RuleError, match="Input type"):
        ConvolvesInBackward.apply(x).sum().backward()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_grad_modes(context):
    with torch12_rules(), context():
        assert (torch.tensor([3]) / 2).item() == 1
        with pytest.raises(Torch12RuleError, match=MIXED_SUM):
            HALF * FLOAT
    with context(), torch12_rules(), pytest.raises(Torch12RuleError, match=MIXED_SUM):
        HALF * FLOAT


def net(dtype=torch.float32):
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.PReLU(), nn.Flatten(), nn.Linear(16, 2)
    return nn.Sequential(*layers).to(dtype)


def train(optimizer, dtype=torch.float32, autocast=None):
    """Two steps with every part that a training loop has."""
    model = net(dtype)
    steps = optimizer(model.parameters())
    for _ in range(2):
        steps.zero_grad()
        cast = torch.autocast("cpu", dtype=autocast) if autocast else contextlib.nullcontext()
        with cast:
            y = model(torch.randn(2, 3, 4, 4).to(dtype))
            loss = F.cross_entropy(y, torch.tensor([0, 1]))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        steps.step()
    return [p.detach().clone() for p in model.parameters()]


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=False),
    "sgd-foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, foreach=False),
    "adam-foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_clean_training_loop_is_unchanged(optimizer):
    plain = train(optimizer)
    with torch12_rules(on_violation="record") as rules:
        train(optimizer)
    assert rules.violations == []
    with torch12_rules():
        ruled = train(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(plain, ruled, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocasts_own_casts_are_explicit(dtype):
    with torch12_rules():
        train(OPTIMIZERS["sgd"], autocast=dtype)


def test_half_model_with_float32_batch_norm_and_clipping():
    """Plain batch norm under O2 and O3 + keep: torch 1.2 ran it."""
    model = net(torch.half)
    model[1].float()
    with torch12_rules():
        model(torch.randn(2, 3, 4, 4).half()).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert model[1].weight.grad.dtype == torch.float32


@pytest.mark.parametrize(
    "run",
    [
        lambda: nn.Embedding(4, 3)(torch.tensor([1, 2])).sum().backward(),
        lambda: torch.ones(3)[torch.tensor([True, False, True])],
        lambda: torch.where(FLOAT > 0, FLOAT, 0.0),
        lambda: F.dropout(FLOAT.clone().requires_grad_(), 0.5).sum().backward(),
        lambda: nn.LSTM(2, 2)(torch.ones(1, 1, 2))[0].sum().backward(),
        lambda: nn.MultiheadAttention(4, 2)(*[torch.ones(1, 1, 4)] * 3)[0].sum().backward(),
        lambda: repr(HALF) + repr(torch.arange(3)),
        lambda: HALF.float() + FLOAT,
    ],
)
def test_ordinary_code_is_left_alone(run):
    with torch12_rules() as rules:
        run()
    assert rules.violations == []


def test_a_wrong_on_violation_is_one_sentence():
    with pytest.raises(InputError, match="on_violation must be 'raise' or 'record', not 'warn'"):
        torch12_rules(on_violation="warn").__enter__()


def test_every_rule_is_described():
    rows = {row["rule"]: row for row in describe_rules()}
    assert {entry.rule for entry in TABLE.values()} | {"gradient"} == set(rows)
    bases = ("recorded in torch 1.2.0 on a CPU", "report's own text", "torch 1.2 docum")
    assert all(any(basis in row["basis"] for basis in bases) for row in rows.values())
    assert all("mode" in row["enforced_by"] for row in rows.values())


def test_the_error_comes_out_of_a_worker_process_whole():
    with torch12_rules(), pytest.raises(Torch12RuleError) as caught:
        torch.ones(3) + torch.ones(3, dtype=torch.double)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.violation) == (str(caught.value), caught.value.violation)
