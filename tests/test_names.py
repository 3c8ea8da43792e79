"""Public names are the field's words (docs/glossary.md): none has one of the words of our own that were replaced."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(ROOT.glob("packages/*/src/**/*.py"))
REPLACED = {
    "room": "static buffers",
    "dead": "padding",
    "alive": "real",
    "living": "real",
    "bury": "fill padding",
    "brought": "prefetched",
    "carry": "propagate a tag; or attach extra fields",
    "carried": "extra fields",
    "carrying": "with extra fields",
    "moves": "row dim rules",
    "waits": "host syncs",
    "fired": "trace events",
    "seen": "cache",
    "settled": "migrate or repartition",
    "shown": "passed to the model; trimmed",
    "folded": "reduce ghosts",
    "widened": "pad ghost zeros",
    "idle": "no exchange",
    "slack": "list margin",
    "blind": "speculative",
    "warmth": "temperature ratio",
    "pace": "FIRE parameters",
    "told": "format",
    "breathing": "barostat degrees of freedom",
    "cuts": "partition planes; bisection",
    "desk": "writer queue",
    "dealt": "file slice",
    "moment": "rollback",
    "homeward": "reverse",
    "travel": "exchange; all to all",
    "anew": "rebuilt",
}
"""A word -> what the field says for it."""


def public_names(path):
    """The file's name, and what it defines that has no leading underscore: classes, functions, their parameters, fields."""
    yield path.stem
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            yield node.name
            yield from (f.target.id for f in node.body if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name))
        elif isinstance(node, ast.FunctionDef):
            yield node.name
            yield from (a.arg for a in (*node.args.args, *node.args.kwonlyargs))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign):
            yield from (t.id for t in statement.targets if isinstance(t, ast.Name))


def words(name):
    """`AllToAllRows`, `all_to_all_rows` -> all, to, all, rows."""
    return re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)


@pytest.mark.parametrize("package", sorted(p.name for p in (ROOT / "packages").iterdir()))
def test_no_public_name_has_a_word_that_was_replaced(package):
    found = {
        f"{path.relative_to(ROOT)}: {name} ({REPLACED[word.lower()]})"
        for path in SOURCES
        if package in path.parts
        for name in public_names(path)
        if not name.startswith("_")
        for word in words(name)
        if word.lower() in REPLACED
    }
    assert not found, "\n".join(sorted(found))


def test_the_glossary_has_at_most_25_terms_and_lammpss_and_torchs_word_for_each():
    rows = [line for line in (ROOT / "docs/glossary.md").read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    head, _, *terms = ([cell.strip() for cell in row.strip("|").split("|")] for row in rows)
    assert any("LAMMPS" in cell for cell in head) and any("torch" in cell for cell in head)
    assert 15 <= len(terms) <= 25 and all(len(term) == len(head) and all(term) for term in terms)
