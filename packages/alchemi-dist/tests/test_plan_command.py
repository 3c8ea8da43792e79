"""The command `alchemi plan`: its table for people, and its JSON for programs."""

import json

import ase.build
import ase.io
import pytest
import typer
from typer.testing import CliRunner

from alchemi_dist.cli.plan import plan_command

app = typer.Typer()
app.command("plan")(plan_command)


def call(*arguments, code=0):
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def rows_of(*arguments):
    return json.loads(call(*arguments, "--json", "-").stdout)


def test_the_table_has_every_number_of_atoms_on_every_number_of_ranks(tmp_path):
    result = call("--atoms", "1e6,2e9", "--ranks", "8,4096", "--json", tmp_path / "plan.json")
    assert "125k" in result.output and "2G" in result.output and "cube, 0.05 atoms/Å³" in result.output
    assert "…" not in result.output  # fits 80 columns
    rows = json.loads((tmp_path / "plan.json").read_text())
    assert [(row["atoms"], row["ranks"]) for row in rows] == [(10**6, 8), (10**6, 4096), (2 * 10**9, 8), (2 * 10**9, 4096)]
    assert [row["neighbours_max"] for row in rows] == [7, 26, 7, 26]
    assert rows[0]["ghost_ratio"] < rows[1]["ghost_ratio"] and rows[3]["ghost_ratio"] < rows[1]["ghost_ratio"]
    assert all(row["imbalance"] < 1.01 for row in rows)


def test_bytes_count_positions_features_and_their_gradients():
    common = "--atoms", "1e6", "--ranks", "8", "--layers"
    for options, per_ghost in (
        ((2, "--width", 64), 48 + 3 * 64 * 4),
        ((1, "--width", 10, "--dtype", "float64"), 48 + 80),
        ((0,), 48),
    ):
        (row,) = rows_of(*common, *options)
        assert row["bytes"] == pytest.approx(row["ghosts_max"] * per_ghost)
        assert row["messages"] == 7 * (2 + max(0, 2 * options[0] - 1))


def test_ghosts_depend_on_the_surface_of_the_shape():
    ghosts = {s: rows_of("--atoms", "1e8", "--ranks", "64", "--shape", s)[0] for s in ("cube", "slab", "cluster")}
    assert ghosts["slab"]["ghost_ratio"] < ghosts["cluster"]["ghost_ratio"] < ghosts["cube"]["ghost_ratio"]
    assert ghosts["slab"]["neighbours_max"] == 8
    (grid,) = rows_of("--atoms", "1e8", "--ranks", "64", "--shape", "cluster", "--method", "grid")
    assert grid["imbalance"] > 1.5 > ghosts["cluster"]["imbalance"]


def test_a_file_is_repeated_to_a_billion_atoms(tmp_path):
    silicon = ase.build.bulk("Si", cubic=True) * (2, 1, 1)
    silicon.write(tmp_path / "si.extxyz")
    small, large = rows_of(tmp_path / "si.extxyz", "--atoms", "16,1e9", "--ranks", "512")
    assert small["atoms"] == 16 and 1e9 <= large["atoms"] < 1.005e9
    (cube,) = rows_of("--atoms", large["atoms"], "--ranks", "512", "--density", 8 / 5.43**3)
    assert large["ghosts_mean"] == pytest.approx(cube["ghosts_mean"], rel=0.01)


def test_a_slab_is_repeated_only_along_its_surface(tmp_path):
    slab = ase.build.fcc111("Cu", (3, 3, 6), vacuum=10)
    slab.info.clear()
    slab.write(tmp_path / "slab.extxyz")
    (row,) = rows_of(tmp_path / "slab.extxyz", "--atoms", "1e7", "--ranks", "64")
    assert 1e7 <= row["atoms"] < 1.01e7 and row["neighbours_max"] <= 8


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--atoms", "1e6,many"], "InputError: --atoms 1e6,many"),
        (["--ranks", "0"], "InputError: --ranks 0"),
        (["--atoms", "1.5"], "whole numbers"),
        (["--density", "0"], "InputError: --density 0"),
        (["no-such-file.xyz"], "FileNotFoundError"),
    ],
)
def test_bad_input_exits_with_2_and_one_message(options, says):
    output = call(*options, code=2).output
    assert says in output and "Traceback" not in output


def test_a_structure_that_is_not_periodic_cannot_be_repeated(tmp_path):
    ase.build.molecule("C60").write(tmp_path / "c60.extxyz")
    assert "give --atoms 60" in call(tmp_path / "c60.extxyz", code=2).output
    assert rows_of(tmp_path / "c60.extxyz", "--atoms", "60", "--ranks", "2")[0]["ghosts_max"] == pytest.approx(30, rel=0.1)
    (tmp_path / "notes.txt").write_text("no atoms here")
    assert "InputError" in call(tmp_path / "notes.txt", code=2).output
