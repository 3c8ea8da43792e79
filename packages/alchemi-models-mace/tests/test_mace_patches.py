"""Importing MACE and loading its models leaves nothing behind in the process."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from alchemi_models_mace.patches import (
    WEIGHTS_ONLY_VARIABLE,
    allow_pickle_loading,
    keep_default_dtype,
    keep_weights_only_setting,
)

PICKLE = Path(__file__).parent / "data" / "small-e3nn-0.4.4.model"
IN_A_FRESH_PROCESS = """
import os, pickle, shutil, sys
from pathlib import Path
import torch
from alchemi_models_mace import MACEWrapper
from alchemi_models_mace.patches import WEIGHTS_ONLY_VARIABLE
from mace.calculators import foundations_models

pickled, cache = sys.argv[1:]
assert WEIGHTS_ONLY_VARIABLE not in os.environ, "after the import"
try:
    torch.load(pickled)
except pickle.UnpicklingError:
    pass
else:
    raise AssertionError("torch.load runs code by default")
assert MACEWrapper.from_checkpoint(pickled, trust_pickle=True).cutoff == 4.5
assert WEIGHTS_ONLY_VARIABLE not in os.environ, "after loading a file"

name = "".join(c for c in Path(foundations_models.mace_mp_urls["small"]).name if c.isalnum() or c == "_")
(Path(cache) / "mace").mkdir()
shutil.copy(pickled, Path(cache) / "mace" / name)  # where MACE's own loader keeps what it has downloaded
assert MACEWrapper.from_checkpoint("small").cutoff == 4.5
assert WEIGHTS_ONLY_VARIABLE not in os.environ, "after loading by name"
"""


def test_importing_and_loading_leave_torch_s_safe_loading_on(tmp_path):
    """MACE sets the variable at import, and its loaders need it."""
    environment = {k: v for k, v in os.environ.items() if k != WEIGHTS_ONLY_VARIABLE} | {"XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", IN_A_FRESH_PROCESS, str(PICKLE), str(tmp_path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("before", [None, "0", "1"])
@pytest.mark.parametrize("guard", [keep_weights_only_setting, allow_pickle_loading])
def test_the_variable_is_restored_after_an_error(monkeypatch, guard, before):
    if before is None:
        monkeypatch.delenv(WEIGHTS_ONLY_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(WEIGHTS_ONLY_VARIABLE, before)
    with contextlib.suppress(KeyError), guard():
        assert os.environ.get(WEIGHTS_ONLY_VARIABLE) == ("1" if guard is allow_pickle_loading else before)
        os.environ[WEIGHTS_ONLY_VARIABLE] = "anything"
        raise KeyError
    assert os.environ.get(WEIGHTS_ONLY_VARIABLE) == before


def test_the_default_dtype_is_restored():
    before = torch.get_default_dtype()
    with contextlib.suppress(KeyError), keep_default_dtype():
        torch.set_default_dtype(torch.float16)
        raise KeyError
    assert torch.get_default_dtype() == before
