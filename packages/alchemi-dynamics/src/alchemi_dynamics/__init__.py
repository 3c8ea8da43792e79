"""Molecular dynamics and relaxation on any number of ranks: what moves, and the ensembles that move it."""

from alchemi_dynamics.checkpoint import Checkpoint, load_checkpoint
from alchemi_dynamics.fire import FIRE, Pace
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
    "Hook",
    "Integrator",
    "Langevin",
    "NoseHooverChain",
    "Pace",
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
