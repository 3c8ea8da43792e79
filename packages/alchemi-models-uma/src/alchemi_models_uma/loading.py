"""Checkpoints by fairchem-core's own code: its names, its format, its fixes for older releases."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from fairchem.core.calculate.pretrained_mlip import UnknownCheckpointError, resolve_checkpoint
from fairchem.core.models.base import HydraModel
from fairchem.core.units.mlip_unit.api.inference import InferenceSettings, guess_inference_settings
from fairchem.core.units.mlip_unit.utils import get_backbone_class_from_checkpoint, load_inference_model

from alchemi_spec import UntrustedPickle


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """While open, new floats are of this type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def load(name: str | Path, settings: InferenceSettings | str, trust_pickle: bool) -> tuple[HydraModel, InferenceSettings]:
    """A checkpoint's averaged weights, as `settings` ask for, and its tasks set up.

    Raises:
        UntrustedPickle: for a file, unless `trust_pickle`.
        FileNotFoundError: where there is neither such a file nor such a name; it lists fairchem's names.

    """
    if Path(name).exists() and not trust_pickle:
        raise UntrustedPickle(
            f"{name} is a pickle: loading it runs whatever code is stored in it, which torch refuses by default.\n"
            f"If you trust where it comes from, pass trust_pickle=True (--trust-pickle at the command line)."
        )
    try:
        path = resolve_checkpoint(str(name)).path
    except UnknownCheckpointError as error:
        raise FileNotFoundError(str(error)) from error
    settings = guess_inference_settings(settings)
    checkpoint = torch.load(path, map_location="cpu", weights_only=False)
    overrides = {"backbone": get_backbone_class_from_checkpoint(checkpoint).build_inference_settings(settings)}
    with default_dtype(settings.base_precision_dtype):  # in which tables are made that no file has
        averaged, checkpoint = load_inference_model(path, overrides, use_ema=True, preloaded_checkpoint=checkpoint)
        model: HydraModel = averaged.module
        model.setup_tasks(checkpoint.tasks_config)
    return model.to(settings.base_precision_dtype).requires_grad_(False).eval(), settings
