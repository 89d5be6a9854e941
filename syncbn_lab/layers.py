"""What every batch norm layer of a model receives and gives in one training step.

The recorder adds hooks and clones; it does no arithmetic and changes no dtype, so it may stand
under any precision recipe and any dtype rules. The verdict reads its records.
"""

import contextlib
import inspect
from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

# apex's O1 patches methods of torch.Tensor: its ``cpu`` casts to float32 on the way. An original
# method kept from before does not help, because under a function mode torch looks a method up by
# name again. The operators themselves are out of reach of any patch; before they could be called
# so, methods that apex leaves alone have to do.
_DETACH: Any = None
_COPY: Any = None
with contextlib.suppress(AttributeError, RuntimeError):
    _DETACH, _COPY = torch.ops.aten.detach.default, torch.ops.aten._to_copy.default


class LayerRecord:
    """What one batch norm layer received and gave in one training step, on one rank."""

    def __init__(
        self,
        name: str,
        eps: float,
        momentum: Optional[float],
        training: bool,
        x: Tensor,
        y: Tensor,
        weight: Optional[Tensor],
        bias: Optional[Tensor],
        running_mean_before: Optional[Tensor],
        running_var_before: Optional[Tensor],
        running_mean: Optional[Tensor] = None,
        running_var: Optional[Tensor] = None,
        num_batches_tracked: int = 0,
        dy: Optional[Tensor] = None,
        dx: Optional[Tensor] = None,
        dweight: Optional[Tensor] = None,
        dbias: Optional[Tensor] = None,
        batch_mean: Optional[Tensor] = None,
        batch_var: Optional[Tensor] = None,
    ) -> None:
        self.name = name
        """Module path, such as "block1.bn2"."""
        self.eps, self.momentum, self.training = eps, momentum, training
        self.x, self.y, self.weight, self.bias = x, y, weight, bias
        self.running_mean_before = running_mean_before
        self.running_var_before = running_var_before
        self.running_mean, self.running_var = running_mean, running_var
        self.num_batches_tracked = num_batches_tracked
        """Before this batch."""
        self.dy, self.dx = dy, dx
        self.dweight, self.dbias = dweight, dbias
        """This call's alone, before they are added to ``.grad``. None where a backward pass went
        through several calls of the layer: only the sum of their gradients ever exists."""
        self.batch_mean, self.batch_var = batch_mean, batch_var
        """The layer's own batch statistics, where its code shows them (apex's fallback does)."""


class LayerRecorder:
    """Context manager: one ``LayerRecord`` for every forward of every batch norm layer.

    The input that a layer sees is an alias (``view_as``) of the tensor it was given, so that
    the gradient caught is this layer's alone even where the tensor has other readers.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.records: List[LayerRecord] = []
        self.running: List[str] = []
        """Module paths entered and not yet left, outermost first: where an error was raised."""
        self._model = model
        self._handles: List[Any] = []
        self._open: Dict[str, LayerRecord] = {}
        self._frame_owner: Dict[int, LayerRecord] = {}
        # Every parameter seen, and the calls that may yet contribute to its gradient.
        self._waiting: Dict[int, Tuple[Tensor, List[LayerRecord]]] = {}

    def __enter__(self) -> "LayerRecorder":
        for name, module in self._model.named_modules():
            if name:
                self._handles.append(module.register_forward_pre_hook(self._enter(name)))
                self._handles.append(module.register_forward_hook(self._leave(name)))
            if isinstance(module, _BatchNorm):
                before, after = self._before(name), self._after(name)
                self._handles.append(_before_forward(module, before))
                self._handles.append(module.register_forward_hook(after))
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._waiting.clear()

    @property
    def failing_module(self) -> Optional[str]:
        """The innermost module that was entered and not left."""
        return self.running[-1] if self.running else None

    def record_of(self, module: object) -> Optional[LayerRecord]:
        """The latest record of one module object."""
        return self._frame_owner.get(id(module))

    def _enter(self, name: str) -> Any:
        def hook(module: torch.nn.Module, args: Tuple[Any, ...]) -> None:
            self.running.append(name)

        return hook

    def _leave(self, name: str) -> Any:
        def hook(module: torch.nn.Module, args: Tuple[Any, ...], output: Any) -> None:
            # What was entered since and never left has raised, and somebody caught it.
            while self.running.pop() != name:
                pass

        return hook

    def _before(self, name: str) -> Any:
        def hook(module: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
            x = args[0] if args else kwargs["input"]
            tracked = module.num_batches_tracked
            record = LayerRecord(
                name=name,
                eps=module.eps,
                momentum=module.momentum,
                training=module.training,
                x=copy(x),
                y=torch.empty(0),
                weight=copy(module.weight),
                bias=copy(module.bias),
                running_mean_before=copy(module.running_mean),
                running_var_before=copy(module.running_var),
                num_batches_tracked=0 if tracked is None else int(tracked),
            )
            self.records.append(record)
            self._open[name] = record
            self._frame_owner[id(module)] = record
            for parameter, slot in ((module.weight, "dweight"), (module.bias, "dbias")):
                if parameter is not None and parameter.requires_grad and torch.is_grad_enabled():
                    self._await(parameter, slot, record)
            if not (x.requires_grad and torch.is_grad_enabled()):
                return None
            alias = x.view_as(x)
            alias.register_hook(_catch(record, "dx"))
            if not args:
                return args, dict(kwargs, input=alias)
            return (alias, *args[1:]), kwargs

        return hook

    def _await(self, parameter: Tensor, slot: str, record: LayerRecord) -> None:
        """Catch a parameter's gradient for the one call that it comes from."""
        if id(parameter) not in self._waiting:
            waiting: List[LayerRecord] = []
            self._waiting[id(parameter)] = parameter, waiting

            def hook(grad: Tensor) -> None:
                # A call's output has its gradient before its parameters have theirs.
                called = [waiter for waiter in waiting if waiter.dy is not None]
                waiting[:] = [waiter for waiter in waiting if waiter.dy is None]
                if len(called) == 1:
                    setattr(called[0], slot, copy(grad))

            self._handles.append(parameter.register_hook(hook))
        self._waiting[id(parameter)][1].append(record)

    def _after(self, name: str) -> Any:
        def hook(module: Any, args: Tuple[Any, ...], output: Any) -> None:
            record = self._open.pop(name)
            record.running_mean = copy(module.running_mean)
            record.running_var = copy(module.running_var)
            if isinstance(output, Tensor):
                record.y = copy(output)
                if output.requires_grad:
                    output.register_hook(_catch(record, "dy"))

        return hook


def _before_forward(module: Any, hook: Any) -> Any:
    """Call ``hook(module, args, kwargs)`` before forward; torch before 2.0 has no kwargs there."""
    register = module.register_forward_pre_hook
    if "with_kwargs" in inspect.signature(register).parameters:
        return register(hook, with_kwargs=True)

    def without_kwargs(module: Any, args: Tuple[Any, ...]) -> Any:
        changed = hook(module, args, {})
        return None if changed is None else changed[0]

    return register(without_kwargs)


def copy(value: Optional[Tensor]) -> Any:
    """A copy on the CPU, of the same dtype whatever apex has patched; None stays None."""
    if value is None:
        return None
    if _COPY is None:
        return value.detach().to("cpu", copy=True)
    return _COPY(_DETACH(value), device="cpu")


def _catch(record: LayerRecord, slot: str) -> Any:
    def hook(grad: Tensor) -> None:
        setattr(record, slot, copy(grad))

    return hook
