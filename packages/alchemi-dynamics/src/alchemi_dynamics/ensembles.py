"""The ensembles that alchemi brings: entry points `alchemi.ensembles`, each a function of a run's settings."""

from ase.units import GPa

from alchemi_dynamics.langevin import Langevin
from alchemi_dynamics.nose_hoover import NoseHooverChain
from alchemi_dynamics.npt import NPT
from alchemi_dynamics.nve import NVE
from alchemi_dynamics.settings import MDSettings
from alchemi_spec import InputError


def nve(settings: MDSettings) -> NVE:
    """Constant energy."""
    return NVE(settings.timestep)


def langevin(settings: MDSettings) -> Langevin:
    """Constant temperature, by friction and noise."""
    return Langevin(settings.timestep, temperature(settings), settings.friction, settings.seed)


def nvt(settings: MDSettings) -> NoseHooverChain:
    """Constant temperature, by a Nosé-Hoover chain."""
    return NoseHooverChain(settings.timestep, temperature(settings), settings.damping)


def npt(settings: MDSettings) -> NPT:
    """Constant temperature and pressure."""
    pressure = settings.pressure * GPa
    return NPT(settings.timestep, temperature(settings), pressure, settings.damping, settings.pressure_damping, settings.cell)


def temperature(settings: MDSettings) -> float:
    """The temperature in K, which ensembles with a thermostat need.

    Raises:
        InputError: where it is not given.

    """
    if settings.temperature is None:
        raise InputError(f"the ensemble {settings.ensemble} needs a temperature in K: give for example --temperature 300.")
    return settings.temperature
