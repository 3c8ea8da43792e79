"""The search for what keeps a step from being captured: host syncs, and results whose size depends on values."""

import linecache
import os
import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
_SYNCS = {
    *(_ATEN._local_scalar_dense, _ATEN.nonzero, _ATEN.masked_select, _ATEN.equal, _ATEN.bincount, _ATEN.is_nonzero),
    *(_ATEN._unique2, _ATEN.unique_consecutive, _ATEN.unique_dim, _ATEN.repeat_interleave),
}
"""Their result, or its size, has to be known on the host."""
_NOT_THE_MODEL = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)


class HostSyncDetector(TorchDispatchMode):
    """While open, lists each host sync as `operation at file:line: code`, with the line that asked for it.

    Host syncs are found on the CPU too, where nothing waits: `item`, `bool`, `nonzero`, boolean masks, `unique` and the
    like. Copies between host and device (`tolist`, `cpu`, a tensor made on the host) are seen on CUDA only.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and look at it."""
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        masked = func.overloadpacket in (_ATEN.index, _ATEN.index_put, _ATEN.index_put_) and any(
            i is not None and i.dtype == torch.bool for i in args[1]
        )
        if func.overloadpacket in _SYNCS or masked or _crosses(func.overloadpacket, result, args):
            self.found.append(f"{func.overloadpacket.__name__} {source_line(sys._getframe(1))}")
        return result


def _crosses(op: Any, result: Any, args: Any) -> bool:
    """Whether an operation copies to the host, or to the device from memory that is not pinned."""
    given = [a for a in args if isinstance(a, Tensor)]
    if not isinstance(result, Tensor) or all(t.device.type == result.device.type for t in given):
        return False
    copies = op in (_ATEN._to_copy, _ATEN.copy_)
    return result.device.type == "cpu" or (copies and given[-1].device.type == "cpu" and not given[-1].is_pinned())


def source_line(frame: FrameType | None) -> str:
    """The nearest line outside torch and this package, from this frame outwards."""
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_MODEL):
        frame = frame.f_back
    if frame is None:
        return "at an unknown line"
    path, line = frame.f_code.co_filename, frame.f_lineno
    return f"at {path}:{line}: {linecache.getline(path, line).strip()}"
