import json
import pickle
import subprocess
import sys

import pytest

import alchemi_spec
from alchemi_spec import (
    FIELDS,
    SPEC_LJ_HALO,
    SPEC_MPNN_HALO,
    DistributionSpec,
    SpecError,
    UnsupportedElement,
    check_elements,
)


@pytest.mark.parametrize(
    "spec", [SPEC_MPNN_HALO, SPEC_LJ_HALO, DistributionSpec(name="x", output_kinds={"energy": "per_graph"})]
)
def test_a_spec_survives_json_and_pickle(spec, tmp_path):
    spec.save(tmp_path / "spec.json")
    assert DistributionSpec.load(tmp_path / "spec.json") == spec
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_a_spec_is_frozen_and_compared_by_value():
    with pytest.raises(ValueError, match="frozen"):
        SPEC_MPNN_HALO.name = "other"
    assert SPEC_MPNN_HALO.model_copy(update={"name": "lj_halo"}) == SPEC_LJ_HALO


@pytest.mark.parametrize("change", [{"polcy": {}}, {"policy": {"kind": "halo", "depht": 2}}, {"policy": {"layout": "padded"}}])
def test_an_unknown_key_or_value_is_refused_by_name(change, tmp_path):
    written = json.loads(SPEC_MPNN_HALO.model_dump_json()) | change
    (tmp_path / "spec.json").write_text(json.dumps(written))
    key = next(key for key in ("polcy", "depht", "layout") if key in str(change))
    with pytest.raises(SpecError, match=key):
        DistributionSpec.load(tmp_path / "spec.json")


@pytest.mark.parametrize("key", ["policy", "version", "output_kinds"])
def test_a_missing_key_is_refused_by_name(key, tmp_path):
    written = json.loads(SPEC_MPNN_HALO.model_dump_json())
    del written[key]
    (tmp_path / "spec.json").write_text(json.dumps(written))
    with pytest.raises(SpecError, match=key):
        DistributionSpec.load(tmp_path / "spec.json")


def test_an_unknown_element_is_named_with_its_index_and_what_is_allowed():
    check_elements([1, 8, 1], frozenset({1, 8}))
    with pytest.raises(UnsupportedElement, match=r"atom 12 is Si \(atomic number 14\).*\n.*H, O"):
        check_elements([1, 14], frozenset({1, 8}), ids=[7, 12])
    with pytest.raises(ValueError, match="atom 0 is no element"):
        check_elements([0], None)


def test_errors_survive_pickling():
    for name in alchemi_spec.errors.__dict__:
        error = getattr(alchemi_spec.errors, name)
        if isinstance(error, type) and issubclass(error, alchemi_spec.AlchemiError):
            assert pickle.loads(pickle.dumps(error("atom 3"))).args == ("atom 3",)


def test_the_data_contract_states_unit_and_level_of_what_is_computed():
    assert {name: FIELDS[name].unit for name in ("energy", "forces", "stress")} == {
        "energy": "eV",
        "forces": "eV/Å",
        "stress": "eV/Å^3",
    }


def test_importing_the_package_imports_no_torch():
    code = "import alchemi_spec, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
