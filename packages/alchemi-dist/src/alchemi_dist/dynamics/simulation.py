"""The loop: moves atoms by an integrator, keeps the lists right, and calls hooks. The same on every number of ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from ase.data import atomic_masses
from torch import Tensor

from alchemi_dist.domain import Domain
from alchemi_dist.dynamics.integrator import Integrator
from alchemi_dist.dynamics.state import State
from alchemi_spec import InputError, NonFinitePosition

AHEAD = 0.8
"""The part of the steps that today's speeds allow before the lists end which is made without looking."""
FIRST = 8
"""At most so many at first; twice as many as went well the last time, a quarter of those that were taken back."""


class Hook(Protocol):
    """Called on every rank after each `every` steps, and before the first; may read and reduce, and changes nothing."""

    every: int

    def __call__(self, simulation: "Simulation") -> None:
        """Look at `simulation.state`: this rank's atoms, with their whole forces."""
        ...


@dataclass
class _Moment:
    """What a step changes, to go back to: in place, by another object, and in the integrator."""

    tensors: dict[str, Tensor]
    others: dict[str, Any]
    integrator: dict[str, Tensor]


class Simulation:
    """Atoms in motion: `domain`'s batch, moved by `integrator`. Every rank must make the same calls.

    `forces`: functions of the state that change `state.forces` in place after each evaluation: clamps, fields, constraints.
    They are called again for steps that are made again, so they should remember nothing.

    While lists last, a step of a model that ignores longer edges is one exchange of positions, what its layers exchange, and
    no host synchronisation: as many steps as the fastest atom's speed allows are made without looking, then the smallest
    slack of all of them is read. If lists had ended meanwhile, the steps are taken back and made again with care; so none is
    ever right by luck. Another model's lists are trimmed at each step, which waits for the device.
    """

    def __init__(
        self,
        domain: Domain,
        integrator: Integrator,
        hooks: Sequence[Hook] = (),
        forces: Sequence[Callable[[State], None]] = (),
    ) -> None:
        """Velocities are the batch's `carried["velocities"]` (n_owned, 3) Å/fs, default at rest; masses (amu) likewise.

        Raises:
            InputError: where positions are not float64, in which small steps would be lost.

        """
        if domain.batch.positions.dtype != torch.float64:
            raise InputError(f"positions move in float64, not {domain.batch.positions.dtype}: share out a batch of that dtype.")
        self.domain, self.integrator, self.hooks, self.forces = domain, integrator, list(hooks), list(forces)
        self.rebuilds = self.taken_back = 0
        self._ahead, self._most, self._started = 0, FIRST, False
        batch = domain.batch
        moving = {
            "velocities": torch.zeros_like(batch.positions),
            "masses": torch.from_numpy(atomic_masses).to(batch.positions)[batch.atomic_numbers],
        }
        given = {name: batch.carried[name].double() for name in moving if name in batch.carried}
        domain.batch = batch.carrying(**(moving | given))
        self.state = State.of(domain.batch, integrator.conserves_momentum)

    def start(self) -> None:
        """Evaluate forces, tell the integrator and call hooks, unless that was done. `run` does it."""
        if not self._started:
            self._evaluate()
            self.integrator.start(self.state)
            self._started = True
            self._call_hooks()

    def resume(self, step: int, integrator: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint after `step` steps, with what `integrator.state_dict()` was."""
        self.state.step, device = step, self.domain.batch.comm.device
        self.integrator.load_state_dict({name: value.to(device) for name, value in integrator.items()})
        self._evaluate()
        self._started = True

    @torch.inference_mode(False)
    @torch.no_grad()
    def run(self, steps: int, until: Callable[[State], Tensor] | None = None) -> bool:
        """Make `steps` steps, or fewer if `until(state)` (B,) is true for every system; whether it was at the end.

        Raises:
            NonFinitePosition: on every rank, naming an atom whose position or force is nan or infinite.
            InputError: where another simulation has moved the domain on.

        """
        if self.state.positions is not self.domain.batch.positions:
            raise InputError("another simulation has moved this domain's atoms: make a new one to go on from where they are.")
        self.start()
        end = self.state.step + steps
        while self.state.step < end:
            if until is not None and bool(until(self.state).all()):
                return True
            blind = min(self._ahead, *(h.every - self.state.step % h.every for h in self.hooks), end - self.state.step)
            if until is not None or blind < 2:
                self._step_with_care()
            elif not self._steps_without_looking(blind):
                continue
            self._call_hooks()
        self._check_forces()
        return until is not None and bool(until(self.state).all())

    def _step_with_care(self) -> None:
        self.integrator.first_half(self.state)
        if not self._slack_left(self.domain.slack()):
            self.domain.rebuild()
            self.rebuilds += 1
            self.state.adopt(self.domain.batch)
            self._slack_left(self.domain.slack())
        self._finish_step()

    def _steps_without_looking(self, steps: int) -> bool:
        """Whether lists lasted; otherwise everything is as it was."""
        before, least = self._moment(), self.domain.slack()
        for _ in range(steps):
            self.integrator.first_half(self.state)
            least = torch.minimum(least, self.domain.slack())
            self._finish_step()
        if self._slack_left(least):
            self._most = max(self._most, 2 * steps)
            return True
        self._go_back(before)
        self._most, self.taken_back = max(1, steps // 4), self.taken_back + steps
        return False

    def _finish_step(self) -> None:
        self.state.step += 1
        self._evaluate()
        self.integrator.second_half(self.state)

    def _slack_left(self, slack: Tensor) -> bool:
        """Whether no rank's slack is negative, in one reduction; and how many steps it will last at the present speeds."""
        speeds = torch.linalg.vector_norm(self.state.velocities, dim=-1)
        both = torch.stack([-slack.nan_to_num(nan=-torch.inf), torch.cat([speeds, speeds.new_zeros(1)]).amax().nan_to_num()])
        least, fastest = self.domain.batch.comm.all_reduce(both, "max").tolist()
        timestep = getattr(self.integrator, "timestep", None)
        reach = 2 * fastest * timestep if isinstance(timestep, float) else 0.0
        self._ahead = min(self._most, int(AHEAD * -least / reach)) if reach > 0 and least < 0 else 0
        return bool(least <= 0)

    def _evaluate(self) -> None:
        state = self.state
        results = self.domain.evaluate(self.integrator.outputs)
        state.energy, state.forces = (results[name].detach().double() for name in ("energy", "forces"))
        state.stress = results["stress"].detach().double() if "stress" in results else None
        with torch.enable_grad():  # a bias may be a gradient
            for change in self.forces:
                change(state)
        state.forces = state.forces.detach()

    def _call_hooks(self) -> None:
        due = [hook for hook in self.hooks if self.state.step % hook.every == 0]
        if due:
            self._check_forces()
        for hook in due:
            hook(self)

    def _check_forces(self) -> None:
        """Refuse forces that are nan or infinite, before anybody is shown them."""
        state = self.state
        bad = ~state.forces.isfinite().all(-1)
        if state.comm.all_reduce(bad.any()):
            with state.comm.agreement():
                if bad.any():
                    row = int(bad.nonzero()[0])
                    raise NonFinitePosition(
                        f"the force on atom {int(state.ids[row])} is {state.forces[row].tolist()} eV/Å after step "
                        f"{state.step}.\nThe time step is too long, or the model was not made for such a structure."
                    )

    def _moment(self) -> _Moment:
        tensors = {name: getattr(self.state, name).clone() for name in ("positions", "velocities", "cell")}
        others: dict[str, Any] = {name: getattr(self.state, name).clone() for name in ("forces", "energy")}
        others |= {"step": self.state.step, "stress": None if self.state.stress is None else self.state.stress.clone()}
        return _Moment(tensors, others, {name: value.clone() for name, value in self.integrator.state_dict().items()})

    def _go_back(self, moment: _Moment) -> None:
        for name, value in moment.tensors.items():
            getattr(self.state, name).copy_(value)
        for name, value in moment.others.items():
            setattr(self.state, name, value)
        self.integrator.load_state_dict(moment.integrator)
        self._ahead = 0
