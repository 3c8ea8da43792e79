"""Print the layers of the packages and of the folders of alchemi-shardtensor, and all circles of imports. Fails on a circle.

    uv run python tools/layers.py

Imports inside functions and under TYPE_CHECKING count, so that no circle is hidden by one.
"""

import sys
import tomllib
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]


def main() -> int:
    """Print layers and circles; 1 if there is a circle."""
    graph = grimp.build_graph(*CONFIG["root_packages"], cache_dir=None)
    modules = {m: graph.find_modules_directly_imported_by(m) & graph.modules for m in graph.modules}
    circles = find_circles(modules)
    print("Packages, each above what it imports:")
    show_layers(merged(modules, CONFIG["root_packages"]))
    print("\nFolders of alchemi-shardtensor:")
    folders = sorted(m for m in graph.find_children("alchemi_shardtensor") if graph.find_children(m))
    show_layers(merged(modules, folders))
    print(f"\n{len(modules)} modules, {sum(map(len, modules.values()))} imports, circles: {len(circles) or 'none'}")
    for circle in circles:
        print("  " + " -> ".join(circle))
    return bool(circles)


def merged(modules: Mapping[str, Iterable[str]], roots: Iterable[str]) -> dict[str, set[str]]:
    """The imports between whole packages or folders."""
    home = {m: root for root in roots for m in modules if m == root or m.startswith(f"{root}.")}
    found: dict[str, set[str]] = {root: set() for root in roots}
    for module, imported in modules.items():
        if module in home:
            found[home[module]] |= {home[m] for m in imported if m in home} - {home[module]}
    return found


def show_layers(imports: Mapping[str, Iterable[str]]) -> None:
    """The layers, the top one first."""
    sorter, layers = TopologicalSorter(imports), []
    sorter.prepare()
    while sorter.is_active():
        layers.append(sorted(sorter.get_ready()))
        sorter.done(*layers[-1])
    for layer in reversed(layers):
        print("  " + "  ".join(layer))


def find_circles(modules: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Circles of modules, one after another: each is cut at one import, to find the next."""
    imports, circles = {m: set(imported) for m, imported in modules.items()}, []
    while True:
        try:
            TopologicalSorter(imports).prepare()
        except CycleError as error:
            circle = error.args[1][::-1]
            circles.append(circle)
            imports[circle[0]].discard(circle[1])
        else:
            return circles


if __name__ == "__main__":
    sys.exit(main())
