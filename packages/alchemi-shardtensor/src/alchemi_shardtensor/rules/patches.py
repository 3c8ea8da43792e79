"""The only place in this package that replaces attributes of foreign modules and classes.

Reason: code that is not ours and gathers or adds inside itself can be reached in no other way. What replaces it is named in the
model's specification (seen in fairchem-core 2.24). A replacement lasts as long as `adapted` is open, around one call of the
model. It is process-wide meanwhile: two threads that run models with helpers see each other's.
"""

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from alchemi_shardtensor.rules.adapters import adapt_function, is_operator
from alchemi_spec import DistributionSpec, PythonAdapter, SpecError


@contextmanager
def adapted(spec: DistributionSpec) -> Iterator[None]:
    """While open, methods and functions are replaced as `spec` says. Put it around the model's call."""
    with ExitStack() as replaced:
        for adapter in spec.custom_ops:
            if not is_operator(adapter):
                module, _, name = adapter.op.partition(":")
                original = _found(module, name)
                replaced.enter_context(patch.object(_found(module), name, _instead(original, adapt_function(adapter))))
        for helper in spec.helpers:
            if isinstance(helper, PythonAdapter):
                owner, name = _found(helper.module_path), helper.function_name
            else:
                owner, name = _found(helper.module_path, helper.class_name), helper.method_name
            original = owner.__dict__[name] if name in vars(owner) else getattr(owner, name)
            replacement = _found(*helper.replacement.split(":"))
            replaced.enter_context(patch.object(owner, name, _instead(original, replacement)))
        yield


def _instead(original: Any, replacement: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    return call


def _found(module: str, qualname: str = "") -> Any:
    """The object of this name.

    Raises:
        SpecError: where there is none.

    """
    try:
        found = importlib.import_module(module)
        for part in qualname.split(".") if qualname else ():
            found = getattr(found, part)
        return found
    except (ImportError, AttributeError) as error:
        raise SpecError(f"the specification names {module}:{qualname}, which is not there: {error}.") from error


def unscripted(original: Any, *args: Any, **kwargs: Any) -> Any:
    """A replacement for a function that torch.jit.script compiled: the Python that it was compiled from."""
    return original._torchdynamo_inline(*args, **kwargs)
