"""Every check, here and in CI: `uv run nox`. One session: `uv run nox -s lint`."""

import os
import shutil
import tempfile
import tomllib
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv"
nox.options.error_on_missing_interpreters = True

ROOT = Path(__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = sorted(p.parent.name for p in (ROOT / "packages").glob("*/pyproject.toml"))
DIST = ROOT / "dist"
EXTRAS = {"alchemi-shardtensor": "[testing]"}
ALSO = {
    "alchemi-halo": ["alchemi-shardtensor[testing]", "hypothesis"],
    "alchemi-dist": ["alchemi-shardtensor[testing]"],
    "alchemi-domain": ["alchemi-graphpart", "alchemi-models-classical", "alchemi-shardtensor[testing]"],
    "alchemi-dynamics": ["alchemi-graphpart", "alchemi-models-classical", "alchemi-shardtensor[testing]", "scipy"],
    "alchemi-models-classical": ["ase"],
    "alchemi-graphpart": ["alchemi-halo", "alchemi-shardtensor[testing]"],
    "alchemi-kernels": ["ase"],
    "alchemi-shardtensor": ["mpi4py", "mpich"],
    "alchemi-spec": ["hypothesis"],
}
"""What a package's tests need beside its declared dependencies."""
ABSENT = {
    "alchemi-domain": ("typer", "rich", "zarr"),
    "alchemi-dynamics": ("typer", "rich"),
    "alchemi-spec": ("torch", "numpy"),
}
"""What a package must not bring into a bare environment."""
ALONE = """
import importlib, importlib.util, sys
importlib.import_module(sys.argv[1])
assert not [name for name in sys.argv[2:] if importlib.util.find_spec(name)]
"""
"""Import a package that is installed alone; what it must not bring is not there."""
PYTEST = ("pytest", "-n", "auto", "--maxprocesses", "4", "--dist", "worksteal", "-m", "not long and not gpu")
"""Each worker has ranks of its own, with one thread each."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
TORCH = "torch" + PROJECT["tool"]["uv"]["constraint-dependencies"][0].removeprefix("torch")


def in_workspace(session: nox.Session, *command: str, **env: str) -> None:
    """Run in the workspace's own environment, which `uv run` keeps in step with the project."""
    session.run("uv", "run", "--no-sync", *command, external=True, env=env)


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Style, and the layers of the packages."""
    in_workspace(session, "ruff", "check", ".")
    in_workspace(session, "ruff", "format", "--check", ".")
    in_workspace(session, "lint-imports")
    in_workspace(session, "python", "tools/layers.py")


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Strict types in every package's source."""
    in_workspace(session, "mypy")


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """The site, every warning an error."""
    in_workspace(session, "mkdocs", "build", "--strict", NO_MKDOCS_2_WARNING="1")


@nox.session(venv_backend="none")
def wheels(session: nox.Session) -> None:
    """A wheel of each package in dist/, and the locked requirements as they should be."""
    shutil.rmtree(DIST, ignore_errors=True)
    session.run("uv", "build", "--quiet", "--all-packages", "--wheel", "--out-dir", str(DIST), external=True)
    missing = set(PACKAGES) - {wheel.name.split("-")[0].replace("_", "-") for wheel in DIST.glob("*.whl")}
    if missing:
        session.error(f"no wheel of {', '.join(sorted(missing))}")
    locked = Path("requirements/locked.txt")
    before = locked.read_text(encoding="utf-8")
    export(session)
    if locked.read_text(encoding="utf-8") != before:
        session.error(f"{locked} was not what the project resolves to: it has been written anew, commit it")


@nox.session(venv_backend="none", default=False)
def export(session: nox.Session) -> None:
    """Write requirements/locked.txt, the hashed resolution without addresses."""
    options = ["--quiet", "--all-packages", "--all-groups", "--no-emit-workspace", "--no-header", "--no-annotate"]
    session.run("uv", "export", *options, "--output-file", "requirements/locked.txt", external=True, silent=True)


@nox.session(requires=["wheels"])
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def tests(session: nox.Session, package: str) -> None:
    """A package's wheel and its declared dependencies alone, and its own tests."""
    newest = PROJECT["tool"]["uv"]["exclude-newer"]
    alone = [package] if package == "alchemi-spec" else [package, TORCH]
    for_tests = [f"{package}{EXTRAS.get(package, '')}", "pytest", "pytest-timeout", "pytest-xdist", *ALSO.get(package, [])]
    anew = [f"--refresh-package={name}" for name in PACKAGES]  # a wheel of the same version may be another
    with tempfile.TemporaryDirectory() as elsewhere, session.chdir(elsewhere):  # out of reach of the workspace's settings
        for wanted in (alone, [*alone, *for_tests]):
            session.install("--quiet", "--exclude-newer", newest, "--find-links", str(DIST), *anew, *wanted)
            if wanted is alone:
                session.run("python", "-c", ALONE, package.replace("-", "_"), *ABSENT.get(package, ()))
    folder = ROOT / "packages" / package
    session.run(*PYTEST, "-c", "pyproject.toml", str(folder), env=ONE_THREAD)


@nox.session(venv_backend="none")
def together(session: nox.Session) -> None:
    """Real models through all packages on 1, 2, 3 and 4 gloo ranks."""
    in_workspace(session, *PYTEST, "tests", **ONE_THREAD)


@nox.session(venv_backend="none", default=False)
def long(session: nox.Session) -> None:
    """Whole trajectories: thousands of steps, each compared with one process; compilers; 16 ranks. Half an hour."""
    for folder in ("packages/alchemi-dynamics/tests", "packages/alchemi-shardtensor/tests", "tests"):
        in_workspace(session, *PYTEST[:-1], "long", folder, **ONE_THREAD)


@nox.session(venv_backend="none")
def multigpu(session: nox.Session) -> None:
    """The same on 1, 2, 4 and 8 GPUs through NCCL, as many as there are."""
    count = "import torch; print(torch.cuda.device_count())"
    found = session.run("uv", "run", "--no-sync", "python", "-c", count, external=True, silent=True) or "0"
    if not int(found.split()[-1]):
        session.skip("torch finds no CUDA device on this machine")
    in_workspace(session, "pytest", "tests", "-m", "gpu")


nox.options.sessions = ["lint", "types", "docs", "wheels", "tests", "together", "multigpu"]
if os.environ.get("CI"):
    nox.options.report = None
