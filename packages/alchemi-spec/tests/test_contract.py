import pickle
import subprocess
import sys

import pytest

import alchemi_spec
from alchemi_spec import FIELDS, SPEC_MPNN_HALO, Model, ModelInput, ModelOutput, UnsupportedElement, check_elements


def test_the_typed_contract_has_the_fields_of_the_data_contract():
    assert ModelInput.__required_keys__ == {name for name in ModelInput.__annotations__ if not FIELDS[name].optional}
    assert [*ModelInput.__annotations__, *ModelOutput.__annotations__] == list(FIELDS)
    assert [*ModelOutput.__annotations__] == ["energy", "forces", "stress"]


def test_the_data_contract_states_level_shape_dtype_and_unit():
    first = {"node": "N", "edge": "E", "system": "B"}
    for name, field in FIELDS.items():
        assert any(str(size).startswith(first[field.level]) for size in field.shape), name
        assert field.dtype in ("real", "int64", "bool")
    assert {name: FIELDS[name].unit for name in ("positions", "charge", "energy", "forces", "stress")} == {
        "positions": "Å",
        "charge": "e",
        "energy": "eV",
        "forces": "eV/Å",
        "stress": "eV/Å^3",
    }


def test_a_model_is_recognised_at_runtime():
    class Mine:
        cutoff, elements, dtype, distribution_spec = 5.0, None, float, SPEC_MPNN_HALO

        def forward(self, data, outputs):
            return {}

    assert isinstance(Mine(), Model)
    assert not isinstance(object(), Model)


def test_an_unknown_element_is_named_with_its_index_and_what_is_allowed():
    check_elements([1, 8, 1], frozenset({1, 8}))
    with pytest.raises(UnsupportedElement, match=r"atom 12 is Si \(atomic number 14\).*\n.*H, O"):
        check_elements([1, 14], frozenset({1, 8}), ids=[7, 12])
    with pytest.raises(ValueError, match="atom 0 is no element"):
        check_elements([0], None)
    check_elements([118], None)


def test_errors_survive_pickling():
    for name in alchemi_spec.errors.__dict__:
        error = getattr(alchemi_spec.errors, name)
        if isinstance(error, type) and issubclass(error, alchemi_spec.AlchemiError):
            assert pickle.loads(pickle.dumps(error("atom 3"))).args == ("atom 3",)


def test_using_the_package_imports_no_torch():
    code = (
        "import alchemi_spec, sys; from alchemi_spec import *; MLIPSpec.json_schema();"
        "MLIPSpec(name='x', distribution={'policy': {'kind': 'sharded'}}) | SPEC_LJ_HALO;"
        "OpAdapter('ns::op'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-W", "error", "-c", code], check=False).returncode == 0
