"""The loop: an integrator moves the atoms, lists stay valid, hooks are called. The same on any number of ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol, cast

import torch
from ase.data import atomic_masses
from torch import Tensor

from alchemi_domain.domain import Domain
from alchemi_dynamics.integrator import Integrator
from alchemi_dynamics.parameters import fingerprint
from alchemi_dynamics.state import EXTRA_FIELDS, State
from alchemi_spec import InputError, NonFinitePosition

SPECULATIVE_PART = 0.8
"""How many steps are run speculatively: this part of those that the lists would last at the present speeds."""
FIRST_BLOCK = 8
"""The longest first block of speculative steps. It is doubled when a block went well, and a quarter after a rollback."""


class Hook(Protocol):
    """Called on every rank before the first step and after each `every` steps. It may read and reduce, and changes nothing."""

    every: int

    def __call__(self, simulation: "Simulation") -> None:
        """Look at `simulation.state`: this rank's atoms, with their complete forces."""
        ...


CHANGED = ("positions", "velocities", "cell", "forces", "energy", "stress")
"""What a step changes of a state, in place, besides the number of the step."""


class _Rollback(NamedTuple):
    """Copies of all that a step changes, to return to."""

    step: int
    state: dict[str, Tensor]
    integrator: dict[str, Tensor]


class Simulation:
    """Atoms in motion: `integrator` moves the atoms of `domain`. Every rank must make the same calls.

    `forces`: functions that change `state.forces` in place after each evaluation, such as clamps, fields and constraints. They
    are called again for steps that are repeated after a rollback, so they must depend on the state alone.

    While the lists are valid, a step of a model that ignores longer edges is one exchange of positions, what the model's layers
    exchange, and no host synchronisation. Steps are speculative: as many as the fastest atom's speed allows are run in a
    block, then the smallest list margin of all of them is read. If a list was too old for one of them, the block is rolled
    back and repeated with checked steps, each of which reads the margin before it evaluates. So no force ever comes from an
    old list. For other models lists are trimmed at each step, which synchronises with the host unless steps are captured.

    If steps are captured, each half of the integrator and the evaluation between them is one CUDA graph on all rows of the
    domain's buffers, padding included. `state` shows the real atoms.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        domain: Domain,
        integrator: Integrator,
        hooks: Sequence[Hook] = (),
        forces: Sequence[Callable[[State], None]] = (),
    ) -> None:
        """Velocities (n_owned, 3) Å/fs and masses (n_owned,) amu are the batch's extra fields, if it has them.

        By default atoms are at rest and have their elements' masses.

        Raises:
            InputError: if positions are not float64, in which small steps would be lost.

        """
        if domain.batch.positions.dtype != torch.float64:
            raise InputError(f"positions move in float64, not {domain.batch.positions.dtype}: scatter a batch of that dtype.")
        self.domain, self.integrator, self.hooks, self.forces = domain, integrator, list(hooks), list(forces)
        self.rebuilds = self.rolled_back = 0
        self._n_speculative, self._longest_block, self._started = 0, FIRST_BLOCK, False
        self._fingerprint: object = None
        _attach_moving_fields(domain)
        device = domain.batch.comm.device
        self.state = State.of(domain.atoms, integrator.conserves_momentum)
        self._step_number = torch.zeros((), dtype=torch.long, device=device)
        self._least_margin = torch.full((), torch.inf, dtype=torch.float64, device=device)
        self._step_on_buffers()
        self._view_real_atoms()

    def _step_on_buffers(self) -> None:
        """Have integrators step all rows of the domain's buffers. Captured steps end with the buffers that they work on."""
        atoms, step = self.domain.atoms, cast(int, self._step_number)
        forces = torch.zeros_like(atoms.all_rows.positions)
        self._all_rows = replace(self.state, atoms=atoms, forces=forces, step=step, with_padding=True)
        self._capture()

    def _view_real_atoms(self) -> None:
        """Show the atoms that are this rank's since the last neighbour-list rebuild."""
        atoms = self.domain.atoms
        self.state.atoms, self.state.forces = atoms, self._all_rows.forces[: atoms.n_real]
        self._batch = self.domain.batch

    def _capture(self) -> None:
        self._first, self._second = map(self.domain.capture_step, (self._first_half, self._second_half))

    def _first_half(self) -> None:
        self._integrate(self.integrator.first_half)
        self._least_margin.copy_(torch.minimum(self._least_margin, self.domain.list_margin()))

    def _second_half(self) -> None:
        self._step_number += 1
        self._integrate(self.integrator.second_half)

    def _integrate(self, half: Callable[[State], None]) -> None:
        half(self._all_rows)
        if self.domain.buffers is not None:  # a graph keeps the numbers and addresses of its recording
            before, self._fingerprint = self._fingerprint, fingerprint(self.integrator)
            recording = self._step_number.is_cuda and torch.cuda.is_current_stream_capturing()
            if before != self._fingerprint and recording:
                raise RuntimeError("the integrator replaces its tensors: it must change them in place.")

    @torch.inference_mode(False)
    def start(self) -> None:
        """Evaluate forces, start the integrator and call hooks, unless that was done. `run` calls it."""
        if not self._started:
            self._checked_evaluation()
            self.integrator.start(self.state)
            self._started = True
            self._call_hooks()

    @torch.inference_mode(False)
    def resume(self, step: int, integrator: Mapping[str, Tensor]) -> None:
        """Continue from a checkpoint after `step` steps, with what `integrator.state_dict()` was."""
        self.state.step, device = step, self.domain.batch.comm.device
        self._step_number.fill_(step)
        self.integrator.load_state_dict({name: value.to(device) for name, value in integrator.items()})
        self._checked_evaluation()
        self._started = True

    @torch.inference_mode(False)
    @torch.no_grad()
    def run(self, steps: int, until: Callable[[State], Tensor] | None = None) -> bool:
        """Make `steps` steps, or fewer if `until(state)` (B,) becomes true for every system; return whether it did.

        Raises:
            NonFinitePosition: on every rank, naming an atom whose position or force is nan or infinite.
            InputError: if another simulation has rebuilt the domain's lists.

        """
        if self._batch is not self.domain.batch:
            raise InputError(
                "another simulation has moved this domain's atoms: make a new one to continue from where they are."
            )
        self._capture_if_changed()
        self.start()
        end = self.state.step + steps
        while self.state.step < end:
            if until is not None and bool(until(self.state).all()):
                return True
            to_hooks = (hook.every - self.state.step % hook.every for hook in self.hooks)
            block = min(self._n_speculative, *to_hooks, end - self.state.step)
            if until is not None or block < 2:
                self._checked_step()
            elif not self._speculative_steps(block):
                continue
            self._call_hooks()
        self._check_forces()
        return until is not None and bool(until(self.state).all())

    def _capture_if_changed(self) -> None:
        """Capture steps again, on all ranks, if on any the integrator has other numbers or tensors than its graphs."""
        changed = self._fingerprint is not None and self._fingerprint != fingerprint(self.integrator)
        if self.domain.buffers is not None and self.state.comm.all_reduce(torch.tensor(changed)):
            self._capture()

    def _checked_step(self) -> None:
        self._first()
        if not self._lists_were_valid():
            self._rebuild()
            self._lists_were_valid()
        self.state.step += 1
        self._checked_evaluation()
        self._second()

    @torch.inference_mode(False)
    def rebuild(self) -> None:
        """Rebuild the neighbour lists now; atoms move to the ranks that own them. Every rank must call it."""
        self.start()
        with torch.no_grad():
            self._rebuild()
            self._checked_evaluation()

    def _rebuild(self) -> None:
        self.domain.rebuild()
        self.rebuilds += 1
        if self.domain.atoms is not self._all_rows.atoms:
            self._step_on_buffers()
        self._view_real_atoms()

    def _speculative_steps(self, steps: int) -> bool:
        """Run a block of steps and return whether the lists were valid for all of them; otherwise all is rolled back."""
        before = self._rollback_point()
        for _ in range(steps):
            self._first()
            self.state.step += 1
            self._evaluate()
            self._second()
        if self._lists_were_valid():
            self._longest_block = max(self._longest_block, 2 * steps)
            return True
        self._roll_back(before)
        self._longest_block, self.rolled_back = max(1, steps // 4), self.rolled_back + steps
        return False

    def _lists_were_valid(self) -> bool:
        """Whether no rank's list margin was negative since the last call. Decides how long the next block is. One reduction."""
        margin = torch.minimum(self._least_margin, self.domain.list_margin())
        self._least_margin.fill_(torch.inf)
        speeds = torch.linalg.vector_norm(self.state.velocities, dim=-1)
        fastest = torch.cat([speeds, speeds.new_zeros(1)]).amax().nan_to_num()
        both = torch.stack([-margin.nan_to_num(nan=-torch.inf), fastest])
        overdrawn, speed = self.domain.batch.comm.all_reduce(both, "max").tolist()
        approach = 2 * speed * (self.integrator.timestep or 0.0)
        lasting = int(SPECULATIVE_PART * -overdrawn / approach) if approach > 0 and overdrawn < 0 else 0
        self._n_speculative = min(self._longest_block, lasting)
        return bool(overdrawn <= 0)

    def _checked_evaluation(self) -> None:
        """Evaluate; again in larger buffers, if more edges came within the cutoff than the buffers hold."""
        self._evaluate()
        if self.domain.edges_overflowed():
            self._rebuild()
            self._evaluate()

    def _evaluate(self) -> None:
        state, all_rows, results = self.state, self._all_rows, self.domain.evaluate_all_rows(self.integrator.outputs)
        if ("stress" in results) != (state.stress is not None):
            state.stress = all_rows.stress = torch.zeros_like(state.cell) if "stress" in results else None
        for name, value in results.items():
            getattr(all_rows, name).copy_(value)
        if self.forces:
            self._change_forces()

    def _change_forces(self) -> None:
        """Call the functions `forces` on a copy, whose gradients are not kept."""
        state, owned = self.state, self.state.forces
        state.forces = owned.clone()
        with torch.enable_grad():  # a bias may be a gradient
            for change in self.forces:
                change(state)
        owned.copy_(state.forces.detach())
        state.forces = owned

    def _call_hooks(self) -> None:
        due = [hook for hook in self.hooks if self.state.step % hook.every == 0]
        if due:
            self._check_forces()
        for hook in due:
            hook(self)

    def _check_forces(self) -> None:
        """Raise an error if a force is nan or infinite, before a hook sees it."""
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

    def _rollback_point(self) -> _Rollback:
        fields = {name: value.clone() for name in CHANGED if (value := getattr(self._all_rows, name)) is not None}
        return _Rollback(self.state.step, fields, {name: t.clone() for name, t in self.integrator.state_dict().items()})

    def _roll_back(self, to: _Rollback) -> None:
        for name, value in to.state.items():
            getattr(self._all_rows, name).copy_(value)
        self.state.step = to.step
        self._step_number.fill_(to.step)
        self.integrator.load_state_dict(to.integrator)
        self._capture_if_changed()
        self._n_speculative = 0


def _attach_moving_fields(domain: Domain) -> None:
    """Give the domain's batch velocities and masses in float64, those that it has not."""
    batch = domain.batch
    default = {
        "velocities": torch.zeros_like(batch.positions),
        "masses": torch.from_numpy(atomic_masses).to(batch.positions)[batch.atomic_numbers],
    }
    given = {name: batch.extra_fields[name].double() for name in EXTRA_FIELDS if name in batch.extra_fields}
    if any(name not in given or given[name] is not batch.extra_fields[name] for name in EXTRA_FIELDS):
        domain.attach_fields(**(default | given))
