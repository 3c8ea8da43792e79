"""The data contract (every field's level, shape, dtype, unit) and the model contract; `T` is the type of a tensor."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Generic, NamedTuple, NotRequired, Protocol, TypedDict, TypeVar, runtime_checkable

from alchemi_spec.errors import UnsupportedElement
from alchemi_spec.policies import StrategyKind
from alchemi_spec.spec import MLIPSpec

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class Level(StrEnum):
    """What one row of a field describes: an atom, a directed pair, or a whole structure."""

    NODE = "node"
    EDGE = "edge"
    SYSTEM = "system"


class Field(NamedTuple):
    """One entry of the data contract. N atoms, E edges, B systems; dtype `real` is the positions' own."""

    level: Level
    shape: tuple[int | str, ...]
    dtype: str
    unit: str | None
    meaning: str
    optional: bool = False


FIELDS: Mapping[str, Field] = {
    "positions": Field(Level.NODE, ("N", 3), "real", "Å", "Cartesian coordinates, never wrapped by us"),
    "atomic_numbers": Field(Level.NODE, ("N",), "int64", None, "1 for hydrogen"),
    "batch": Field(Level.NODE, ("N",), "int64", None, "the system that each atom belongs to"),
    "cell": Field(Level.SYSTEM, ("B", 3, 3), "real", "Å", "lattice vectors in rows; zero where there are none"),
    "pbc": Field(Level.SYSTEM, ("B", 3), "bool", None, "periodic along each lattice vector"),
    "edge_index": Field(Level.EDGE, (2, "E"), "int64", None, "senders, receivers; every edge of each receiver"),
    "edge_shifts": Field(Level.EDGE, ("E", 3), "real", None, "whole-numbered S of x[sender] + S @ cell - x[receiver]"),
    "nodes": Field(Level.NODE, ("N + ghosts",), "int64", None, "x[nodes] are the rows edge_index counts, for fused kernels"),
    "charge": Field(Level.SYSTEM, ("B",), "real", "e", "total charge of the system", optional=True),
    "spin": Field(Level.SYSTEM, ("B",), "int64", None, "spin multiplicity 2S + 1 of the system", optional=True),
    "energy": Field(Level.SYSTEM, ("B",), "real", "eV", "potential energy"),
    "forces": Field(Level.NODE, ("N", 3), "real", "eV/Å", "minus the energy's gradient"),
    "stress": Field(Level.SYSTEM, ("B", 3, 3), "real", "eV/Å^3", "dE/dstrain / V, symmetric, tension positive"),
}
"""The fields that models read (down to `spin`) and return."""


class ModelInput(TypedDict, Generic[T]):
    """The fields that a model is shown, for a type checker: `fields = cast(ModelInput[Tensor], data)`."""

    positions: T
    atomic_numbers: T
    batch: T
    cell: T
    pbc: T
    edge_index: T
    edge_shifts: T
    nodes: T
    charge: NotRequired[T]
    spin: NotRequired[T]


class ModelOutput(TypedDict, Generic[T], total=False):
    """The fields that a model returns, those that were asked for."""

    energy: T
    forces: T
    stress: T


@runtime_checkable
class Model(Protocol[T]):
    """What a model must be: a `torch.nn.Module` with these members, as attributes or properties.

    `model(data, outputs)` takes the fields of `FIELDS` that describe the structure and returns a dict with those of
    `energy`, `forces` and `stress` that `outputs` names. It must not care how many atoms it is shown: under alchemi it
    sees one rank's atoms, and what it gathers from other atoms through `edge_index` arrives by itself. Stress may be
    anything where a system has no volume: it is not read there.

    Have a type checker hold a wrapper to it: `model: Model[Tensor] = MyWrapper()`.
    """

    @property
    def cutoff(self) -> float:
        """The longest edge, in Å."""
        ...

    @property
    def elements(self) -> frozenset[int] | None:
        """The atomic numbers that the model knows, or None for all."""
        ...

    @property
    def dtype(self) -> Any:
        """The torch.dtype of the model's arithmetic; `.to(dtype)` changes it."""
        ...

    @property
    def distribution_spec(self) -> MLIPSpec | Callable[[StrategyKind], MLIPSpec]:
        """How the model may be spread over ranks; for a message-passing model, `SPEC_MPNN_HALO`.

        Or a method that gives it for each kind of strategy, where more than `MLIPSpec.under` makes of it has to change.
        """
        ...

    def forward(self, data: Mapping[str, T], outputs: Sequence[str]) -> Mapping[str, T] | ModelOutput[T]:
        """Compute `outputs` for the structure in `data`."""
        ...


@runtime_checkable
class ValidatesStructures(Protocol[T_contra]):
    """A member that a model may have as well: alchemi calls `validate` on every rank whenever it builds neighbour lists."""

    def validate(self, data: Mapping[str, T_contra]) -> None:
        """Raise an error if the model must not be used for the structure in `data`. Gradients are off.

        Decide by values that are equal on all ranks, such as sums over all atoms. An error that only one rank raises stops
        only that rank.
        """
        ...


@runtime_checkable
class HasEdgeLists(Protocol):
    """A member that a model may have as well: the edge lists that it needs besides the one within `cutoff`."""

    @property
    def edge_lists(self) -> Mapping[str, float]:
        """The name of each further list and its longest edge in Å.

        With `{"dispersion": 12.0}` the model is also passed `edge_index_dispersion` and `edge_shifts_dispersion`.
        """
        ...


def check_elements(numbers: Iterable[int], allowed: frozenset[int] | None, ids: Sequence[int] | None = None) -> None:
    """Refuse the first atom whose element is not `allowed`; `ids` are the indices to report, default 0, 1, 2, ...

    Raises:
        UnsupportedElement: with the element's symbol, the atom's index, and what is allowed.

    """
    for row, number in enumerate(numbers):
        if not 0 < number < len(SYMBOLS) or (allowed is not None and number not in allowed):
            known = "every element" if allowed is None else ", ".join(symbol(z) for z in sorted(allowed))
            raise UnsupportedElement(
                f"atom {row if ids is None else ids[row]} is {symbol(number)} (atomic number {number}), "
                f"which this model does not know.\nIt knows {known}: remove the atom, or use another model."
            )


def symbol(number: int) -> str:
    """Chemical symbol of an atomic number; `no element` outside the periodic table."""
    return SYMBOLS[number] if 0 < number < len(SYMBOLS) else "no element"


SYMBOLS = """
X H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr Rb Sr Y Zr Nb Mo
Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy Ho Er Tm Yb Lu Hf Ta W Re Os Ir Pt Au Hg Tl Pb
Bi Po At Rn Fr Ra Ac Th Pa U Np Pu Am Cm Bk Cf Es Fm Md No Lr Rf Db Sg Bh Hs Mt Ds Rg Cn Nh Fl Mc Lv Ts Og
""".split()
