"""The benchmark runner and its report, on the CPU and on few atoms: that they work, not how fast."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from alchemi_spec import SPEC_MPNN_HALO

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
EXACT = 1e-10
KEYS = """model system atoms edges ranks device dtype compile ms_per_step p95_ms katom_steps_per_s ns_per_day_1fs peak_gib
exchange_share parity""".split()
FEW = "evaluate.steps=2 evaluate.warmup=1 dynamics.steps=3 dynamics.check=2 dynamics.repeats=1 dynamics.block=1".split()
PEER = {"peer": "another", "model": "Lennard-Jones", "system": "argon", "atoms": 108, "ranks": 1, "kernels": "triton"}
SPEED = {"compile": None, "ms_per_step": 1.0, "peak_gib": None, "energy": -8.0, "max_force": 0.1}


@pytest.fixture(scope="module")
def run():
    """The scripts as modules, which ranks must find, too."""
    sys.path.insert(0, str(BENCHMARKS))
    yield lambda script, *words: importlib.import_module(script).main([str(word) for word in words])
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def result(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmarks")
    (folder / "peers.json").write_text(json.dumps({"rows": [PEER | SPEED]}))
    sizes = "--device cpu --atoms 108 --ranks 1 2 --compile off --measure evaluate nvt --set".split()
    config, out = BENCHMARKS / "configs/argon.toml", folder / "argon.json"
    run("run", config, *sizes, *FEW, "--peers", folder / "peers.json", "--out", out)
    return out


def test_rows_have_their_keys_and_parity(result):
    rows = [row for row in json.loads(result.read_text())["rows"] if "peer" not in row]
    assert [(row["ranks"], row["measure"]) for row in rows] == [(1, "evaluate"), (1, "nvt"), (2, "evaluate"), (2, "nvt")]
    for row in rows:
        assert row.get("error") is None and row.keys() >= set(KEYS)
        assert all(gap < EXACT for name, gap in row["parity"].items() if name != "against")
    assert {row["parity"]["against"] for row in rows} == {"itself", "1 rank, off"}
    assert rows[0]["edges"] == rows[2]["edges"] and rows[2]["exchanges"] > 0


def test_weak_scaling_to_8_ranks_has_a_plot(run, tmp_path):
    sizes = "--device cpu --weak 108 --ranks 1 8 --compile off --measure evaluate --set".split()
    run("run", BENCHMARKS / "configs/argon.toml", *sizes, *FEW, "--out", tmp_path / "weak.json")
    rows = json.loads((tmp_path / "weak.json").read_text())["rows"]
    assert [(row["ranks"], row["atoms"], row["weak"]) for row in rows] == [(1, 108, 108), (8, 864, 108)]
    assert all(row["parity"]["forces"] < EXACT for row in rows)
    run("report", tmp_path / "weak.json", "--plots", tmp_path)
    assert (tmp_path / "weak.png").stat().st_size > 10_000


@pytest.mark.parametrize("collective", ["exchange", "all_gather"])
def test_a_configuration_says_how_a_graph_partition_brings_rows(run, collective):
    model = SimpleNamespace(distribution_spec=SPEC_MPNN_HALO)
    specification = importlib.import_module("run").specification
    assert specification(model, {"strategy": "graph", "collective": collective}).distribution.policy.collective == collective
    assert specification(model, {"strategy": "graph"}) is None


def test_the_report_has_a_table_and_plots(run, result, tmp_path, capsys):
    run("report", result, "--plots", tmp_path)
    text = capsys.readouterr().out
    assert "| argon, Lennard-Jones triton float64 | 108 | 2 | off |" in text
    assert "(another triton)" in text and "## Peers" in text
    assert (tmp_path / "strong.png").stat().st_size > 10_000 and (tmp_path / "strong.svg").exists()
