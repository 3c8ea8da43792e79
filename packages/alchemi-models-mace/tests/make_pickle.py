"""Pickle a small MACE, with its calculator's own numbers: run where mace-torch brings e3nn 0.4.4, its own pin.

uv run --no-project --with mace-torch==0.3.16 --with "torch<2.14" python make_pickle.py
"""

import json
from pathlib import Path

import e3nn
import numpy as np
import torch
from small_mace import silica, small_mace

if __name__ == "__main__":
    assert e3nn.__version__ == "0.4.4", e3nn.__version__
    from mace.calculators import MACECalculator

    data = Path(__file__).parent / "data"
    torch.save(small_mace(), data / "small-e3nn-0.4.4.model")
    atoms = silica()
    atoms.calc = MACECalculator(model_paths=str(data / "small-e3nn-0.4.4.model"), device="cpu", default_dtype="float64")
    results = {"energy": atoms.get_potential_energy(), "forces": atoms.get_forces(), "stress": atoms.get_stress(voigt=False)}
    (data / "small-e3nn-0.4.4.json").write_text(json.dumps(results, default=np.ndarray.tolist))
