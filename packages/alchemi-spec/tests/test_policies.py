import json

import pytest
from spec_strategies import HALOS, schema_of_policies

from alchemi_spec import (
    DistributionSpec,
    GraphParallelPolicy,
    HaloStoragePolicy,
    LocalPolicy,
    MLIPSpec,
    ShardedStoragePolicy,
    SpecError,
    StoragePolicy,
)

STRIPED = '''
from typing import Literal
from alchemi_spec import GatherRule, LocalPolicy, ScatterRule, StoragePolicy

class StripedPolicy(StoragePolicy):
    """Stripes."""

    kind: Literal["striped"] = "striped"
    scatter: ScatterRule = ScatterRule.LOCAL
    gather: GatherRule = GatherRule.HALO_READ
    stripes: int = 2

    def merged(self, other):
        if isinstance(other, StripedPolicy):
            return self.replaced(stripes=max(self.stripes, other.stripes))
        return None
'''


@pytest.fixture
def striped(tmp_path, monkeypatch):
    """A policy of another package, which is installed while the test runs."""
    (tmp_path / "striped_policy.py").write_text(STRIPED)
    info = tmp_path / "striped_policy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: striped-policy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[alchemi.policies]\nstriped = striped_policy:StripedPolicy\n")
    monkeypatch.syspath_prepend(tmp_path)
    return pytest.importorskip("striped_policy").StripedPolicy


def test_a_policy_of_another_package_is_found_by_its_kind(striped, tmp_path):
    spec = MLIPSpec(name="x", distribution={"policy": {"kind": "striped", "stripes": 5}})
    assert spec.distribution.policy == striped(stripes=5)
    spec.save(tmp_path / "spec.json")
    assert json.loads((tmp_path / "spec.json").read_text())["distribution"]["policy"]["stripes"] == 5
    assert MLIPSpec.load(tmp_path / "spec.json") == spec
    assert schema_of_policies()[1]["striped"]["stripes"]["type"] == "integer"


def test_a_missing_key_of_a_policy_of_another_package_is_refused(striped, tmp_path):
    written = json.loads(MLIPSpec(name="x", distribution={"policy": striped()}).model_dump_json())
    del written["distribution"]["policy"]["stripes"]
    (tmp_path / "spec.json").write_text(json.dumps(written))
    with pytest.raises(SpecError, match="distribution.policy: missing stripes"):
        MLIPSpec.load(tmp_path / "spec.json")
    with pytest.raises(SpecError, match="distribution.policy.stirpes: unknown key"):
        MLIPSpec(name="x", distribution={"policy": {"kind": "striped", "stirpes": 1}})


def test_policies_of_other_packages_decide_how_they_merge(striped):
    assert striped(stripes=2) | striped(stripes=7) == striped(stripes=7)
    assert striped() | LocalPolicy() == LocalPolicy() | striped() == striped()
    with pytest.raises(SpecError, match="policy.kind: 'halo' and 'striped'"):
        HaloStoragePolicy() | striped()
    assert StoragePolicy.merged(striped(), striped()) == striped()
    with pytest.raises(SpecError, match="policy.stripes: 2 and 3"):
        StoragePolicy.merged(striped(), striped(stripes=3))


def test_an_unknown_kind_is_refused_and_the_installed_kinds_are_listed():
    with pytest.raises(SpecError, match=r"no policy has the kind 'striped'; installed are .*halo, local, sharded"):
        DistributionSpec(policy={"kind": "striped"})
    with pytest.raises(SpecError, match="kind None"):
        DistributionSpec(policy={"layout": "owned"})
    with pytest.raises(SpecError, match="policy"):
        DistributionSpec(policy="halo")


@pytest.mark.parametrize(
    ("contradiction", "write_instead"),
    [
        ({"scatter": "distributed"}, "use ShardedStoragePolicy"),
        ({"gather": "distributed", "layout": "padded"}, "use ShardedStoragePolicy"),
        ({"gather": "local"}, "use gather='halo_read', or layout='padded'"),
        ({"scatter": "local"}, "use scatter='halo_correction'"),
        ({"depth": 2}, "use depth=1, or layout='padded'"),
        ({"gather": "local", "layout": "padded"}, "use gather='halo_read'"),
        ({"depth": 0}, "greater than or equal to 1"),
    ],
)
def test_a_contradictory_halo_is_refused_and_the_message_says_how_to_correct_it(contradiction, write_instead):
    with pytest.raises(SpecError) as refused:
        HaloStoragePolicy(**contradiction)
    assert write_instead in str(refused.value)


def test_all_valid_halos():
    assert {(h.layout, str(h.scatter), str(h.gather)) for h in HALOS if h.depth == 1} == {
        ("owned", "halo_correction", "halo_read"),
        ("padded", "halo_correction", "halo_read"),
        ("padded", "local", "halo_read"),
        ("padded", "local", "local"),
    }
    assert {(h.layout, str(h.scatter)) for h in HALOS if h.depth > 1} == {("padded", "local"), ("padded", "halo_correction")}


def test_other_policies_accept_only_their_own_rules():
    for policy, rules in [
        (ShardedStoragePolicy, {"scatter": "halo_correction"}),
        (GraphParallelPolicy, {"scatter": "distributed"}),
        (LocalPolicy, {"gather": "halo_read"}),
    ]:
        with pytest.raises(SpecError, match=next(iter(rules))):
            policy(**rules)
