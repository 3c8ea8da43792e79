"""Patches of a model end with the call, and concern one wrapper only."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from small_uma import small_uma
from test_uma import MERGED, data_of, silica

from alchemi_models_uma import UMAWrapper


def changed_parts(wrapper):
    """Names of modules on whose instances a method is set, and the derivatives that the configuration requests."""
    methods = {"forward", "forward_chunk", "balance_channels", "set_MOLE_coefficients", "_generate_graph"}
    parts = [name for name, module in wrapper.named_modules() if methods & vars(module).keys()]
    return parts, copy.copy(vars(wrapper.backbone.regress_config)), vars(wrapper.backbone.backend)


def test_a_call_leaves_the_model_as_it_was_also_after_an_error():
    wrapper, data = UMAWrapper(small_uma(), "omat", MERGED), data_of(silica())
    before = changed_parts(wrapper)
    assert before[0] == [] and before[1]["stress"]
    wrapper.validate(data)
    expected = wrapper(data, ("energy",))
    assert changed_parts(wrapper) == before
    with pytest.raises(IndexError):
        wrapper(data | {"atomic_numbers": data["atomic_numbers"] + 1000})
    assert changed_parts(wrapper) == before and torch.get_default_dtype() == torch.float32
    assert torch.equal(wrapper(data, ("energy",))["energy"], expected["energy"])


def test_two_wrappers_in_two_threads_do_not_affect_each_other():
    balanced = {"mixture": False, "charge_balanced_channels": [0, 1], "spin_balanced_channels": [2]}
    wrappers = [UMAWrapper(small_uma(seed, **balanced), "omol") for seed in (0, 1)]
    structures = [data_of(silica(charge=charge, spin=2)) for charge in (1, -1)]
    expected = [wrapper(data) for wrapper, data in zip(wrappers, structures, strict=True)]
    with ThreadPoolExecutor(2) as threads:
        for _ in range(3):
            for found, one in zip(threads.map(lambda w, d: w(d), wrappers, structures), expected, strict=True):
                torch.testing.assert_close(found, one, rtol=1e-10, atol=1e-12)
