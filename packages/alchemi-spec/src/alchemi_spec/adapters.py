"""Adapters: how the runtime wraps an opaque op, and which function replaces a method or function. All are kept by name."""

import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from alchemi_spec.errors import SpecError
from alchemi_spec.value import FrozenDict, Table, Value, converts_arguments


class GatherInputs(Value):
    """Owned rows (n_owned, *F) -> [owned | ghost] rows (n_owned + n_ghost, *F), by the exchange."""

    kind: Literal["gather_inputs"] = "gather_inputs"


class GatherInputsFull(Value):
    """Owned rows (n_owned, *F) -> the rows of all nodes (N, *F) in global order, by an all-gather."""

    kind: Literal["gather_inputs_full"] = "gather_inputs_full"


class SliceOwned(Value):
    """[owned | ghost] or global rows -> owned rows (n_owned, *F), so that each atom is counted on one rank."""

    kind: Literal["slice_owned"] = "slice_owned"


class ScatterOutputs(Value):
    """Partial [owned | ghost] rows -> owned rows (n_owned, *F). The reverse adds ghost rows to the rows of their owners."""

    kind: Literal["scatter_outputs"] = "scatter_outputs"


class AllReduceSum(Value):
    """Each rank's partial sum (*F) -> the total (*F) on every rank."""

    kind: Literal["all_reduce_sum"] = "all_reduce_sum"


class SliceOutputsOwned(Value):
    """Complete [owned | ghost] or global rows -> owned rows (n_owned, *F)."""

    kind: Literal["slice_outputs_owned"] = "slice_outputs_owned"


class SameRows(Value):
    """Rows (n, *F), each computed from one row of the arguments (also within lists) that have n rows: the same kind of rows."""

    kind: Literal["same_rows"] = "same_rows"


InputTransform = Annotated[GatherInputs | GatherInputsFull | SliceOwned, Field(discriminator="kind")]
OutputTransform = Annotated[ScatterOutputs | AllReduceSum | SliceOutputsOwned | SameRows, Field(discriminator="kind")]


def name_of(live: object) -> str:
    """The name `module:qualname` of a function or class. A name is returned unchanged.

    Raises:
        SpecError: if the object cannot be found by this name.

    """
    if isinstance(live, str):
        return live
    module, qualname = getattr(live, "__module__", None), getattr(live, "__qualname__", "")
    found = sys.modules.get(str(module))
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if found is not live or not qualname:
        raise SpecError(
            f"{live!r} has no name by which it can be found again. Lambdas, local functions and partials have none: "
            f"define it at the top level of a module"
        )
    return f"{module}:{qualname}"


def name_of_op(op: object) -> str:
    """The name of a torch op: `ns::name` for a packet or its default overload, else `ns::name.overload`. Else as `name_of`."""
    for attribute in ("_qualified_op_name", "_qualname"):  # OpOverloadPacket and torch.library.custom_op have these
        if isinstance(name := getattr(op, attribute, None), str):
            return name
    name = getattr(op, "name", None)  # OpOverload has this
    return str(name()) if callable(name) else name_of(op)


def _dotted(name: str) -> str:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"{name!r} is not a dotted name such as 'package.module'")
    return name


def _function(name: str) -> str:
    module, colon, qualname = name.partition(":")
    if not colon:
        raise ValueError(f"{name!r} names no module: write 'module:name'")
    return f"{_dotted(module)}:{_dotted(qualname)}"


def _op(name: str) -> str:
    namespace, colons, op = name.partition("::")
    if not colons:
        return _function(name)
    if op.count(".") > 1:
        raise ValueError(f"{name!r} is not the name of an op: write 'ns::name', or 'ns::name.overload'")
    return f"{_dotted(namespace)}::{_dotted(op.removesuffix('.default'))}"


def _argument(key: object) -> object:
    if isinstance(key, int) and key < 0:
        raise ValueError(f"position {key}: count from the front, starting at 0")
    return int(key) if isinstance(key, str) and key.isdecimal() else key


Dotted = Annotated[str, AfterValidator(_dotted)]
FunctionName = Annotated[str, BeforeValidator(name_of), AfterValidator(_function)]
OpName = Annotated[str, BeforeValidator(name_of_op), AfterValidator(_op)]
Argument = Annotated[int | str, BeforeValidator(_argument)]
NONE: FrozenDict[Any, Any] = FrozenDict()


class OpAdapter(Value):
    """Transforms for the arguments and results of an opaque op, on each rank.

    `op`: a live op or function, or its name. `ns::name` stands for all overloads; `ns::name.overload` for one, and takes
    precedence. An adapter of an op that does not exist has no effect. Arguments are given by position or by their name in the
    op's signature, however a call passes them; results by position or by key of a returned dict. All others are unchanged.
    """

    op: OpName
    arg_transforms: Table[Argument, InputTransform] = {}
    output_transforms: Table[Argument, OutputTransform] = {}

    @converts_arguments
    def __init__(
        self,
        op: object,
        arg_transforms: Mapping[int | str, InputTransform] = NONE,
        output_transforms: Mapping[int | str, OutputTransform] = NONE,
    ) -> None:
        super().__init__(op=op, arg_transforms=arg_transforms, output_transforms=output_transforms)

    @property
    def target(self) -> str:
        """The name of the adapted op, method or function."""
        return self.op


class MethodAdapter(Value):
    """Call `replacement(original, self, *args, **kwargs)` instead of a method.

    There are two forms: `MethodAdapter(cls, "method", replacement)`, and by names, `MethodAdapter(module_path=...,
    class_name=..., method_name=..., replacement="module:name")`. Both store the names.
    """

    kind: Literal["method"] = "method"
    module_path: Dotted
    class_name: Dotted
    method_name: Dotted
    replacement: FunctionName

    @converts_arguments
    def __init__(
        self,
        cls: type | None = None,
        method_name: str = "",
        replacement: object = "",
        *,
        module_path: str = "",
        class_name: str = "",
    ) -> None:
        if cls is not None:
            module_path, _, class_name = name_of(cls).partition(":")
            if not callable(getattr(cls, method_name, None)):
                raise SpecError(
                    f"{module_path}.{class_name} has no method {method_name!r}: give the name of a method that it has."
                )
        super().__init__(module_path=module_path, class_name=class_name, method_name=method_name, replacement=replacement)

    @property
    def target(self) -> str:
        """The name of the adapted op, method or function."""
        return f"{self.module_path}:{self.class_name}.{self.method_name}"


class PythonAdapter(Value):
    """Call `replacement(original, *args, **kwargs)` instead of a function of a module.

    There are two forms: `PythonAdapter(function, replacement)`, and by names, `PythonAdapter(module_path=...,
    function_name=..., replacement="module:name")`. Both store the names.
    """

    kind: Literal["function"] = "function"
    module_path: Dotted
    function_name: Dotted
    replacement: FunctionName

    @converts_arguments
    def __init__(
        self, function: object = None, replacement: object = "", *, module_path: str = "", function_name: str = ""
    ) -> None:
        if function is not None:
            module_path, _, function_name = name_of(function).partition(":")
        super().__init__(module_path=module_path, function_name=function_name, replacement=replacement)

    @property
    def target(self) -> str:
        """The name of the adapted op, method or function."""
        return f"{self.module_path}:{self.function_name}"
