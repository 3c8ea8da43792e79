"""Load checkpoints by fairchem-core's own code: its names, its format, its fixes for older releases."""

from pathlib import Path

import torch
from fairchem.core.calculate.pretrained_mlip import UnknownCheckpointError, resolve_checkpoint
from fairchem.core.models.base import HydraModel
from fairchem.core.units.mlip_unit.api.inference import InferenceSettings, guess_inference_settings
from fairchem.core.units.mlip_unit.utils import get_backbone_class_from_checkpoint, load_inference_model

from alchemi_models_uma.patches import default_dtype
from alchemi_spec import UntrustedPickle


def load(name: str | Path, settings: InferenceSettings | str, trust_pickle: bool) -> tuple[HydraModel, InferenceSettings]:
    """Load a checkpoint's averaged weights under `settings`, and set up its tasks.

    Raises:
        UntrustedPickle: for a file, unless `trust_pickle`.
        FileNotFoundError: if there is no such file and fairchem knows no such name; it lists fairchem's names.

    """
    if Path(name).exists() and not trust_pickle:
        raise UntrustedPickle.of(name)
    try:
        path = resolve_checkpoint(str(name)).path
    except UnknownCheckpointError as error:
        raise FileNotFoundError(str(error)) from error
    settings = guess_inference_settings(settings)
    checkpoint = torch.load(path, map_location="cpu", weights_only=False)
    overrides = {"backbone": get_backbone_class_from_checkpoint(checkpoint).build_inference_settings(settings)}
    with default_dtype(settings.base_precision_dtype):  # for tables that no checkpoint holds
        averaged, checkpoint = load_inference_model(path, overrides, use_ema=True, preloaded_checkpoint=checkpoint)
        model: HydraModel = averaged.module
        model.setup_tasks(checkpoint.tasks_config)
    return model.to(settings.base_precision_dtype).requires_grad_(False).eval(), settings
