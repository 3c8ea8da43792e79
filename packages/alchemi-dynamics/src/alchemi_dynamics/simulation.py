"""The loop: moves atoms by an integrator, keeps the lists right, and calls hooks. The same on every number of ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from ase.data import atomic_masses
from torch import Tensor

from alchemi_domain.domain import Domain
from alchemi_domain.static_buffers import Room
from alchemi_dynamics.integrator import Integrator
from alchemi_dynamics.parameters import fingerprint
from alchemi_dynamics.state import State
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


CHANGED = ("positions", "velocities", "cell", "forces", "energy", "stress")
"""What a step changes of a state, in place, beside the number of the step."""


class _Moment(NamedTuple):
    """What a step changes, to go back to."""

    step: int
    state: dict[str, Tensor]
    integrator: dict[str, Tensor]


class Simulation:
    """Atoms in motion: `domain`'s batch, moved by `integrator`. Every rank must make the same calls.

    `forces`: functions of the state that change `state.forces` in place after each evaluation: clamps, fields, constraints.
    They are called again for steps that are made again, so they should remember nothing.

    While lists last, a step of a model that ignores longer edges is one exchange of positions, what its layers exchange, and
    no host synchronisation: as many steps as the fastest atom's speed allows are made without looking, then the smallest
    slack of all of them is read. If lists had ended meanwhile, the steps are taken back and made again with care; so none is
    ever right by luck. Another model's lists are trimmed at each step, which waits for the device unless the domain's steps
    are captured.

    Where they are, each half of the integrator and the evaluation between them is one graph, on the rows of the domain's room;
    `state` shows those that are alive.
    """

    @torch.inference_mode(False)
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
        self._room: Room | None = None
        self._key: object = None
        batch = domain.batch
        moving = {
            "velocities": torch.zeros_like(batch.positions),
            "masses": torch.from_numpy(atomic_masses).to(batch.positions)[batch.atomic_numbers],
        }
        given = {name: batch.carried[name].double() for name in moving if name in batch.carried}
        if any(name not in given or given[name] is not batch.carried[name] for name in moving):
            domain.carry(**(moving | given))
        self.state = State.of(domain.batch, integrator.conserves_momentum)
        self._least = torch.full((), torch.inf, dtype=torch.float64, device=domain.batch.comm.device)
        self._number = torch.zeros((), dtype=torch.long, device=domain.batch.comm.device)
        self._hold()

    def _hold(self) -> None:
        """Step on the rows that the domain has now: its room's, dead ones among them, if it has one."""
        state, room = self.state, self.domain.room
        state.adopt(self.domain.batch)
        rows, last = self.domain.batch if room is None else room.batch, len(state.cell) - 1
        if room is None or room is not self._room:
            self._moving = replace(state, forces=torch.zeros_like(rows.positions), step=self._number)  # type: ignore[arg-type]
            self._moving.adopt(replace(rows, batch=rows.batch.clamp(max=last), cell=state.cell, pbc=state.pbc))
            self._moving.counted = None if room is None else rows.batch
            self._room = room
            self._capture()
        else:
            self._moving.batch.copy_(rows.batch.clamp(max=last))
        state.forces = self._moving.forces[: len(state.ids)]

    def _capture(self) -> None:
        self._first, self._second = map(self.domain.captured, (self._first_half, self._second_half))

    def _first_half(self) -> None:
        self._integrate(self.integrator.first_half)
        self._least.copy_(torch.minimum(self._least, self.domain.slack()))

    def _second_half(self) -> None:
        self._number += 1
        self._integrate(self.integrator.second_half)

    def _integrate(self, half: Callable[[State], None]) -> None:
        half(self._moving)
        if self._room is not None:  # a graph keeps what it found at its recording
            before, self._key = self._key, fingerprint(self.integrator)
            if before != self._key and self._moving.positions.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("the integrator replaces its tensors instead of changing them in place.")

    @torch.inference_mode(False)
    def start(self) -> None:
        """Evaluate forces, tell the integrator and call hooks, unless that was done. `run` does it."""
        if not self._started:
            self._evaluate_with_care()
            self.integrator.start(self.state)
            self._started = True
            self._call_hooks()

    @torch.inference_mode(False)
    def resume(self, step: int, integrator: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint after `step` steps, with what `integrator.state_dict()` was."""
        self.state.step, device = step, self.domain.batch.comm.device
        self._number.fill_(step)
        self.integrator.load_state_dict({name: value.to(device) for name, value in integrator.items()})
        self._evaluate_with_care()
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
        self._take_what_was_given()
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

    def _take_what_was_given(self) -> None:
        """Fields that were replaced since the last run, and an integrator that was changed."""
        for name in ("velocities", "masses"):
            given, held = getattr(self.state, name), self.domain.batch.carried[name]
            if given is not held:
                held.copy_(given)
                setattr(self.state, name, held)
        self._capture_if_changed()

    def _capture_if_changed(self) -> None:
        """Anew, on all ranks, where the integrator holds other numbers or tensors than its graphs do on any."""
        changed = self._key is not None and self._key != fingerprint(self.integrator)
        if self._room is not None and self.state.comm.all_reduce(torch.tensor(changed)):
            self._capture()

    def _step_with_care(self) -> None:
        self._first()
        if not self._slack_left():
            self._rebuild()
            self._slack_left()
        self.state.step += 1
        self._evaluate_with_care()
        self._second()

    @torch.inference_mode(False)
    def rebuild(self) -> None:
        """Make lists anew now, atoms moving to their owners. Every rank must call it."""
        self.start()
        with torch.no_grad():
            self._rebuild()
            self._evaluate_with_care()

    def _rebuild(self) -> None:
        self.domain.rebuild()
        self.rebuilds += 1
        self._hold()

    def _steps_without_looking(self, steps: int) -> bool:
        """Whether lists lasted; otherwise everything is as it was."""
        before = self._moment()
        for _ in range(steps):
            self._first()
            self.state.step += 1
            self._evaluate()
            self._second()
        if self._slack_left():
            self._most = max(self._most, 2 * steps)
            return True
        self._go_back(before)
        self._most, self.taken_back = max(1, steps // 4), self.taken_back + steps
        return False

    def _slack_left(self) -> bool:
        """Whether no rank's slack is, or has been since this was asked last, negative, in one reduction.

        And how many steps it will last at present speeds.
        """
        slack = torch.minimum(self._least, self.domain.slack())
        self._least.fill_(torch.inf)
        speeds = torch.linalg.vector_norm(self.state.velocities, dim=-1)
        both = torch.stack([-slack.nan_to_num(nan=-torch.inf), torch.cat([speeds, speeds.new_zeros(1)]).amax().nan_to_num()])
        least, fastest = self.domain.batch.comm.all_reduce(both, "max").tolist()
        timestep = getattr(self.integrator, "timestep", None)
        reach = 2 * fastest * timestep if isinstance(timestep, float) else 0.0
        self._ahead = min(self._most, int(AHEAD * -least / reach)) if reach > 0 and least < 0 else 0
        return bool(least <= 0)

    def _evaluate_with_care(self) -> None:
        """Again in a larger room, where the model was to be shown more edges than there was room for."""
        self._evaluate()
        if self.domain.overflowed():
            self._rebuild()
            self._evaluate()

    def _evaluate(self) -> None:
        state, moving, results = self.state, self._moving, self.domain.computed(self.integrator.outputs)
        if ("stress" in results) != (state.stress is not None):
            state.stress = moving.stress = torch.zeros_like(state.cell) if "stress" in results else None
        for name, value in results.items():
            getattr(moving, name).copy_(value)
        if self.forces:
            whole = state.forces
            state.forces = whole.clone()
            with torch.enable_grad():  # a bias may be a gradient
                for change in self.forces:
                    change(state)
            whole.copy_(state.forces.detach())
            state.forces = whole

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
        held = {name: value.clone() for name in CHANGED if (value := getattr(self._moving, name)) is not None}
        return _Moment(self.state.step, held, {name: value.clone() for name, value in self.integrator.state_dict().items()})

    def _go_back(self, moment: _Moment) -> None:
        for name, value in moment.state.items():
            getattr(self._moving, name).copy_(value)
        self.state.step = moment.step
        self._number.fill_(moment.step)
        self.integrator.load_state_dict(moment.integrator)
        self._capture_if_changed()
        self._ahead = 0
