"""Steps that are repeated on the same tensors: traced to one graph of plain operations, and compiled."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
    track_tensor_tree,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from alchemi_shardtensor.capture.host_sync import source_line
from alchemi_shardtensor.dispatch.tensor import ShardTensor
from alchemi_shardtensor.transport import Comm
from alchemi_spec import MissingHandler

Step = Callable[[], Mapping[str, Tensor]]
WARMUP_CALLS = 2
"""Eager calls before a step is traced, for TorchScript's profiling."""
TOLERANCE = 1e-3
"""How much a compiled result may differ, of the largest: round-off of float32 in another order, and far more."""
_ATEN = torch.ops.aten
_HOST_READS = frozenset([Tensor.tolist, Tensor.numpy, Tensor.__array__])
"""What takes values out of torch, unseen by its dispatcher; of other operations, such as `item`, a tag says so."""


def compile_step(
    function: Step,
    reads: Sequence[Tensor],
    comm: Comm | None = None,
    backend: str | Callable[..., Any] = "inductor",
    model: nn.Module | None = None,
) -> Callable[[], dict[str, Tensor]]:
    """`function` as one compiled graph, with all collectives and all derivatives. Every rank must call it.

    `reads`: the plain tensors whose values change between calls; where they are and their shapes do not. Every other tensor
    that is not made in the step is a constant, read where it is; what the step made of numbers on the host is as it was.
    `function` returns plain tensors and writes to nothing that outlives it; it is called a few times here, and never again.
    `comm`: who has to agree that it was compiled. `backend`: one of torch.compile's. `model`: whose scripted parts may have
    run before. No traffic is counted afterwards.

    Raises:
        MissingHandler: for a step that cannot be one graph, naming the line, or that no compiler takes.

    """
    _forget_fusions(model)
    # operation by operation: what TorchScript fuses, torch does not see
    with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
        for _ in range(WARMUP_CALLS):
            function()
        with _Memory() as memory:
            function()
        graph, names, constants = _traced(function, reads, memory)
    inputs = [t.detach() for t in (*reads, *constants)]
    with (comm or Comm()).agreement():
        run = _lowered(graph, inputs, backend)

    def call() -> dict[str, Tensor]:
        with torch.no_grad():
            return dict(zip(names, run(*inputs), strict=True))

    results, expected = call(), function()
    with (comm or Comm()).agreement():
        for name in names:
            _check_close(name, results[name], expected[name])
    return call


def _forget_fusions(model: nn.Module | None) -> None:
    """Drop TorchScript's execution plans of earlier calls, which it would keep whatever is asked for."""
    parts = [m._c for m in model.modules() if isinstance(m, torch.jit.ScriptModule)] if model is not None else []
    functions: Any = torch.jit._state._python_cu
    for script in (*functions.get_functions(), *(part._get_method(name) for part in parts for name in part._method_names())):
        with suppress(RuntimeError):  # by the old executor, which keeps none
            script._debug_flush_compilation_cache()


def _check_close(name: str, result: Tensor, expected: Tensor) -> None:
    """Kernels that torch does not see being launched are in no graph, and nothing else would tell."""
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    if not torch.allclose(result, expected, rtol=0, atol=TOLERANCE * scale, equal_nan=True):
        raise MissingHandler(
            f"compiled, the step gives another {name}, by {float((result - expected).abs().max()):.2g} of {scale:.2g}: a "
            f"kernel that torch does not see is not in the graph.\nMake it a torch.library.custom_op; or run the step as it is."
        )


def _traced(function: Step, reads: Sequence[Tensor], before: "_Memory") -> tuple[fx.GraphModule, list[str], list[Tensor]]:
    """The step as a graph of (*reads, *constants), the names of its results, and the constants."""
    names: list[str] = []
    trace = _Trace(before)

    def step(*_: Tensor) -> list[Tensor]:
        for t in reads:
            trace.keep(t)
        with trace, _HostReads():
            results = function()
        names.extend(results)
        for t in results.values():
            trace.name(t)
        return list(results.values())

    graph = make_fx(step)(*reads)
    return _lifted(graph, list(trace.constants)), names, list(trace.constants.values())


def _lifted(graph: fx.GraphModule, names: list[str]) -> fx.GraphModule:
    """The same with these attributes as further inputs, so that no compiler copies or folds them."""
    nodes = {node.target: node for node in graph.graph.nodes if node.op == "get_attr" and node.target in names}
    last = next((node for node in reversed(graph.graph.nodes) if node.op == "placeholder"), None)
    for name in names:
        with graph.graph.inserting_before() if last is None else graph.graph.inserting_after(last):
            last = graph.graph.placeholder(name)
        last.meta = nodes[name].meta
        nodes[name].replace_all_uses_with(last)
        graph.graph.erase_node(nodes[name])
        delattr(graph, name)
    graph.recompile()
    return graph


def _lowered(graph: fx.GraphModule, inputs: list[Tensor], backend: str | Callable[..., Any]) -> Callable[..., Sequence[Tensor]]:
    """The graph by a compiler, for inputs of these shapes."""
    from torch._dynamo import lookup_backend  # noqa: PLC0415  which takes seconds to import

    fake = FakeTensorMode()
    shapes: list[Tensor] = [fake.from_tensor(t, static_shapes=True) for t in inputs]
    try:
        with torch.no_grad(), tracing(TracingContext(fake)):
            return lookup_backend(backend)(graph, shapes)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise MissingHandler(f"this step could not be compiled; run it as it is.\n{why}") from error


class _Memory(TorchDispatchMode):
    """While open, notes the memory that is read but not made by any operation: `found`, by its address."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[int, Tensor] = {}
        self.made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and look at it."""
        self.found |= {_memory(t): t for t in _tensors((args, kwargs)) if _memory(t) not in self.made}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        self.made |= {_memory(t): StorageWeakRef(t.untyped_storage()) for t in _tensors(result)}
        return result


class _Trace(TorchDispatchMode):
    """While open in make_fx, gives every tensor its name in the graph by its memory, and refuses what no graph can hold.

    make_fx knows tensors by the object, and would take an alias that it has not seen made, as `as_subclass` makes one,
    for a constant. `before`: the memory that was there before the step.
    """

    def __init__(self, before: _Memory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.before = before
        self.constants: dict[str, Tensor] = {}
        self.names: dict[int, dict[Any, fx.Proxy]] = {}
        self.held: dict[int, StorageWeakRef] = {}
        """So that no other memory gets the address."""
        self.blank: set[int] = set()
        """Memory that nothing has been written to."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Trace the operation, on tensors that have names."""
        kwargs = kwargs or {}
        given = list(_tensors((args, kwargs)))
        with torch._C.DisableTorchFunctionSubclass():
            _check(func, args, kwargs)
            self._check_written(func, given)
            if func.overloadpacket not in (_ATEN.lift_fresh, _ATEN.lift_fresh_copy):  # literals
                for t in given:
                    self.name(t)
            result = func(*args, **kwargs)
            for t in _tensors(result):
                self.keep(t)
        if func.overloadpacket.__name__ in _BLANK:
            self.blank.add(_memory(result))
        return result

    def keep(self, t: Tensor) -> None:
        """Remember the name of this part of its memory."""
        slot = get_proxy_slot(t, _tracer(), None)
        if slot is not None:
            self.held.setdefault(_memory(t), StorageWeakRef(t.untyped_storage()))
            self.names.setdefault(_memory(t), {})[_part(t)] = slot.proxy

    def name(self, t: Tensor) -> None:
        """Give a tensor that make_fx does not know the name of what has its memory, or that of a constant."""
        tracer = _tracer()
        if get_proxy_slot(t, tracer, None) is not None:
            return
        parts = self.names.get(_memory(t))
        proxy = self._constant(t) if parts is None else _named(t, parts)
        with disable_proxy_modes_tracing():
            track_tensor_tree(t, proxy, constant=None, tracer=tracer)
        self.keep(t)

    def _constant(self, t: Tensor) -> fx.Proxy:
        if _memory(t) not in self.before.found:
            _refuse(f"a tensor of shape {tuple(t.shape)} that no operation which torch can trace has made, read")
        name = f"constant_{len(self.constants)}"
        with disable_proxy_modes_tracing():
            self.constants[name] = t.detach().as_subclass(Tensor)
        setattr(_tracer().root, name, self.constants[name])
        return _tracer().create_proxy("get_attr", name, (), {})  # type: ignore[no-any-return]

    def _check_written(self, func: Any, given: list[Tensor]) -> None:
        """Memory must not be read before an operation has written to it: then what did it is not in the graph."""
        if not self.blank:
            return
        blank = {_memory(t) for t in given if t.numel()} & self.blank
        if blank and func._schema.is_mutable:
            self.blank -= blank
        elif blank and not _reads_shape_alone(func):
            _refuse("memory is read that a kernel which torch cannot trace has filled")


def _check(func: Any, args: Any, kwargs: Any) -> None:
    """Refuse host syncs, and tensors whose size depends on values."""
    if torch.Tag.data_dependent_output in func.tags:
        _refuse(f"{func} takes a value to the host")
    if torch.Tag.dynamic_output_shape in func.tags and not _has_known_size(func, args, kwargs):
        _refuse(f"the size of what {func} returns depends on values")
    if func.namespace == "c10d":
        _refuse(f"{func} is not one of the collectives of a Comm")


def _has_known_size(func: Any, args: Any, kwargs: Any) -> bool:
    """Although for other arguments the operation's result has a size that depends on values."""
    if func.overloadpacket is _ATEN.index:
        return all(i is None or i.dtype not in (torch.bool, torch.uint8) for i in args[1])
    return func.overloadpacket is _ATEN.repeat_interleave and kwargs.get("output_size") is not None


def _reads_shape_alone(func: Any) -> bool:
    name = func.overloadpacket.__name__
    views = any(r.alias_info is not None for r in func._schema.returns)
    return views or name.endswith("_like") or name.startswith("new_") or func.namespace == "prim"


_BLANK = frozenset(["empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"])


class _HostReads(TorchFunctionMode):
    """While open, refuses what takes values out of torch; also inside of a ShardTensor's dispatch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function, with this mode still on in the handlers of ShardTensor."""
        if func in _HOST_READS:
            _refuse(f"{func.__name__} takes values to the host")
        if ShardTensor in types and torch._C._is_torch_function_enabled():
            with self:
                return ShardTensor.__torch_function__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def _refuse(why: str) -> NoReturn:
    raise MissingHandler(
        f"this step cannot be compiled to one graph: {why} {source_line(sys._getframe(1))}\n"
        f"Keep the step on the device and its sizes fixed, and make kernels torch.library.custom_op; or run it as it is."
    )


def _tracer() -> Any:
    mode = get_proxy_mode()
    assert mode is not None
    return mode.tracer


def _tensors(values: Any) -> Iterator[Tensor]:
    return (t for t in pytree.tree_leaves(values) if isinstance(t, Tensor))


def _memory(t: Tensor) -> int:
    return t.untyped_storage()._cdata  # type: ignore[no-any-return]


def _part(t: Tensor) -> Any:
    """Which part of its memory a tensor is, and as what."""
    return t.dtype, t.shape, t.stride(), t.storage_offset(), t.is_conj(), t.is_neg()


def _named(t: Tensor, parts: Mapping[Any, fx.Proxy]) -> fx.Proxy:
    """The name of this part of a memory, from those of known parts."""
    if _part(t) in parts:
        return parts[_part(t)]
    whole = next((proxy for part, proxy in parts.items() if part[0] == t.dtype and not any(part[4:])), None)
    if whole is None or t.is_conj() or t.is_neg():
        _refuse(f"a tensor of {t.dtype} aliases one of another type")
    view = list(t.shape), list(t.stride()), t.storage_offset()
    return _tracer().create_proxy("call_function", _ATEN.as_strided.default, (whole, *view), {})  # type: ignore[no-any-return]
