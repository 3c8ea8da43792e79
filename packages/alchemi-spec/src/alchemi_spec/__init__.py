"""What a model declares so that alchemi can run it on many GPUs. No torch here: plain values, JSON in and out."""

from alchemi_spec.contract import FIELDS, Field, Level, Model, check_elements
from alchemi_spec.errors import (
    AlchemiError,
    InputError,
    InvalidCell,
    MissingHandler,
    NonFinitePosition,
    RankFailure,
    SpecError,
    UnsupportedElement,
    UntrustedPickle,
)
from alchemi_spec.spec import (
    SPEC_LJ_HALO,
    SPEC_MPNN_HALO,
    DistributionSpec,
    HaloStoragePolicy,
    OutputKind,
)

__all__ = [
    "FIELDS",
    "SPEC_LJ_HALO",
    "SPEC_MPNN_HALO",
    "AlchemiError",
    "DistributionSpec",
    "Field",
    "HaloStoragePolicy",
    "InputError",
    "InvalidCell",
    "Level",
    "MissingHandler",
    "Model",
    "NonFinitePosition",
    "OutputKind",
    "RankFailure",
    "SpecError",
    "UnsupportedElement",
    "UntrustedPickle",
    "check_elements",
]
