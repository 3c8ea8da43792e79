"""Molecular dynamics and relaxation on any number of ranks."""

from alchemi_dynamics.checkpoint import Checkpoint, load_checkpoint
from alchemi_dynamics.fire import FIRE, FIREParameters
from alchemi_dynamics.integrator import Integrator
from alchemi_dynamics.langevin import Langevin
from alchemi_dynamics.noise import normal
from alchemi_dynamics.nose_hoover import NoseHooverChain
from alchemi_dynamics.npt import NPT
from alchemi_dynamics.nve import NVE
from alchemi_dynamics.report import Report, Thermo
from alchemi_dynamics.simulation import Hook, Simulation
from alchemi_dynamics.state import State
from alchemi_dynamics.velocities import maxwell_boltzmann, remove_drift, rescale, thermalize
from alchemi_dynamics.writers import TrajectoryWriter
from alchemi_dynamics.zarr_writer import ZarrWriter

__all__ = [
    "FIRE",
    "NPT",
    "NVE",
    "Checkpoint",
    "FIREParameters",
    "Hook",
    "Integrator",
    "Langevin",
    "NoseHooverChain",
    "Report",
    "Simulation",
    "State",
    "Thermo",
    "TrajectoryWriter",
    "ZarrWriter",
    "load_checkpoint",
    "maxwell_boltzmann",
    "normal",
    "remove_drift",
    "rescale",
    "thermalize",
]
