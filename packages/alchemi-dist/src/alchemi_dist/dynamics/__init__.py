"""Molecular dynamics and relaxation on any number of ranks: what moves, and the ensembles that move it."""

from alchemi_dist.dynamics.checkpoint import Checkpoint, load_checkpoint
from alchemi_dist.dynamics.fire import FIRE, Pace
from alchemi_dist.dynamics.integrator import Integrator
from alchemi_dist.dynamics.langevin import Langevin
from alchemi_dist.dynamics.noise import normal
from alchemi_dist.dynamics.nose_hoover import NoseHooverChain
from alchemi_dist.dynamics.npt import NPT
from alchemi_dist.dynamics.nve import NVE
from alchemi_dist.dynamics.report import Report, Thermo
from alchemi_dist.dynamics.simulation import Hook, Simulation
from alchemi_dist.dynamics.state import State
from alchemi_dist.dynamics.velocities import maxwell_boltzmann, remove_drift, rescale, thermalize
from alchemi_dist.dynamics.writers import TrajectoryWriter
from alchemi_dist.dynamics.zarr_writer import ZarrWriter

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
