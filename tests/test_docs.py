"""Code in the documentation is code that tests run."""

from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_model_in_the_docs_is_the_one_that_is_tested():
    tested = (ROOT / "packages/alchemi-domain/tests/toy.py").read_text(encoding="utf-8")
    model = tested.partition('up to "end of docs"\n')[2].partition("# end of docs")[0].strip()
    assert model.startswith("class Toy(nn.Module):")
    assert f"```python\n{model}\n```" in (ROOT / "docs/model.md").read_text(encoding="utf-8")
