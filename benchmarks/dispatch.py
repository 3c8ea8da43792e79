"""What a tag costs: µs per operation on a ShardTensor beside the same on a plain tensor, on one thread of the CPU.

    python benchmarks/dispatch.py --out benchmarks/results/dispatch.json

Small tensors, so that the operation itself costs little; medians of repeats, tagged and plain in turn.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch

from alchemi_shardtensor import BOTH, NODES, OWNED, SYSTEMS, Comm, Routing, plain, shard_of, tag
from alchemi_spec import DistributionSpec

N, E, K = 8, 16, 4


class Empty(torch.Tensor):
    """The least that a subclass costs."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """Do nothing but call."""
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


OPERATIONS = {
    "x + x": lambda x, s, r, b: x + x,
    "x.view(-1, 4)": lambda x, s, r, b: x.view(-1, K),
    "x.sum(-1)": lambda x, s, r, b: x.sum(-1),
    "silu(x)": lambda x, s, r, b: torch.nn.functional.silu(x),
    "x[:, 0]": lambda x, s, r, b: x[:, 0],
    "x[receiver]": lambda x, s, r, b: x[r],
    "x[sender]": lambda x, s, r, b: x[s],
    "index_add_ to receivers": lambda x, s, r, b: torch.zeros(N, K).index_add_(0, r, torch.ones(E, K)),
    "index_add_ to systems": lambda x, s, r, b: torch.zeros(1, K).index_add_(0, b, x),
    "x.shape": lambda x, s, r, b: x.shape,
}


def microseconds(operation, arguments, calls):
    """µs per call."""
    start = time.perf_counter()
    for _ in range(calls):
        operation(*arguments)
    return (time.perf_counter() - start) / calls * 1e6


def main():
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    shard = shard_of(DistributionSpec(), Routing.without_ghosts(N, Comm()), 1)
    edge_index = tag(torch.randint(0, N, (2, E)), shard, None, NODES, BOTH)
    tagged = (tag(torch.rand(N, K), shard, OWNED), *edge_index, tag(torch.zeros(N, dtype=torch.long), shard, OWNED, SYSTEMS))
    bare = tuple(plain(t) for t in tagged)
    empty = tuple(t.as_subclass(Empty) for t in bare)
    rows = []
    for name, operation in OPERATIONS.items():
        times = [[microseconds(operation, a, options.calls) for a in (tagged, empty, bare)] for _ in range(options.repeats)]
        with_tag, with_none, without = (statistics.median(column) for column in zip(*times, strict=True))
        rows.append({"operation": name, "tagged_us": round(with_tag, 2), "empty_subclass_us": round(with_none, 2)})
        rows[-1]["plain_us"] = round(without, 2)
        rows[-1]["added_us"] = round(with_tag - without, 2)
        print(
            f"{name:26} {with_tag:7.2f} {with_none:7.2f} {without:7.2f}  added {with_tag - without:6.2f} µs, "
            f"of which an empty subclass {with_none - without:5.2f}"
        )
    if options.out:
        report = {"machine": platform.machine(), "python": platform.python_version(), "torch": torch.__version__, "rows": rows}
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
