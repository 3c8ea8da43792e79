"""The same numbers on CUDA: NCCL where every rank has a GPU of its own, through the host where they share."""

import pytest
import torch
from ase.build import bulk
from graphs import LAYOUTS, UNEVEN, RandomGraph
from small_mace import silica, small_mace
from test_layouts import equalised, layers

from alchemi_dist import Batch, Comm, DistributedModel, Domain, DomainConfig, LennardJones, RankPool, ShardedBatch
from alchemi_domain.evaluate import TOLERANCE
from alchemi_dynamics import FIRE, NPT, NVE, Langevin, NoseHooverChain, Simulation, thermalize
from alchemi_halo import HaloStrategy
from alchemi_models_mace import MACEWrapper
from alchemi_shardtensor import all_gather_rows, max_over_ranks, reduce_scatter_rows, sum_over_ranks
from alchemi_shardtensor.capture import WARMUP_CALLS
from alchemi_shardtensor.testing import ADJOINT, adjoint_gap, count_traffic

pytestmark = pytest.mark.gpu
GPUS = torch.cuda.device_count()
N_RANKS = sorted({n for n in (1, 2, 4, 8) if n <= GPUS} | {2 * GPUS})
F64 = torch.float64


def evaluate(comm, model, atoms):
    config = DomainConfig(comm)
    batch = ShardedBatch.scatter(Batch.from_ase(atoms), config)
    results = DistributedModel(model, config)(batch)
    results["forces"] = batch.gather(results["forces"])
    return {name: value.cpu() for name, value in results.items()}


def argon():
    atoms = bulk("Ar", "fcc", a=5.3, cubic=True) * (5, 5, 5)
    atoms.rattle(0.2, seed=1)
    return atoms


CASES = {
    "lj": lambda: (LennardJones(), argon()),
    "mace": lambda: (MACEWrapper(small_mace(8).requires_grad_(False)), silica(3)),
    "mace with an empty rank": lambda: (MACEWrapper(small_mace(8).requires_grad_(False)), silica()[:3]),
}


@pytest.fixture(scope="module")
def pools():
    """One pool for each number of ranks, and one on the CPU."""
    kept = {}

    def of(n_ranks, device="cuda"):
        if (n_ranks, device) not in kept:
            kept[n_ranks, device] = RankPool(n_ranks, device, preload=["alchemi_models_mace"])
        return kept[n_ranks, device]

    yield of
    for pool in kept.values():
        pool.close()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("n_ranks", N_RANKS)
def test_ranks_on_gpus_equal_one_process_on_the_cpu(pools, n_ranks, name, dtype):
    model, atoms = CASES[name]()
    model = model.to(dtype)
    expected = pools(1, "cpu").run(evaluate, model, atoms)[0]
    everyone = pools(n_ranks).run(evaluate, model, atoms, timeout=240)
    for results in everyone:
        for key, value in expected.items():
            gap = (results[key] - value).abs().max()
            gap = gap / value.abs() if key == "energy" else gap
            assert gap <= TOLERANCE[dtype][key], f"{key} {gap.item()}"


def gaps(comm):
    """The adjoint gap of every collective, uneven and empty rows."""
    counts = [3, 0, 2, 5, 1, 0, 4, 2][: comm.size]
    graph = RandomGraph(comm, owners=UNEVEN)
    fields = torch.arange(graph.n * 2.0).reshape(-1, 2), torch.arange(graph.n), torch.arange(graph.n) > 3
    fields = [f.to(comm.device) for f in fields]
    with torch.device(comm.device):
        found = {}
        for collective in ("exchange", "all_gather"):
            routing = graph.routing.with_collective(collective)
            for features in ((), (4,), (2, 3), (0,)):
                x, g = (torch.randn(n, *features, dtype=F64) for n in (routing.n_owned, routing.n_ghost))
                found[collective, features] = adjoint_gap(routing.exchange, x, comm)
                found[collective, features, "reverse"] = adjoint_gap(routing.reverse, g, comm)
        x, whole = torch.randn(counts[comm.rank], 3, dtype=F64), torch.randn(sum(counts), 3, dtype=F64)
        found["gather"] = adjoint_gap(lambda t: all_gather_rows(t, counts, comm), x, comm)
        found["scatter"] = adjoint_gap(lambda t: reduce_scatter_rows(t, counts, comm), whole, comm)
        found["sum"] = adjoint_gap(lambda t: sum_over_ranks(t, comm), torch.randn(3, 2, dtype=F64), comm)
        assert max_over_ranks(torch.tensor([float(comm.rank)]), comm).item() == comm.size - 1
    ghosts = graph.routing.exchange_all(*(f[graph.mine] for f in fields))
    assert all(torch.equal(a, b[graph.ghosts]) for a, b in zip(ghosts, fields, strict=True))
    return max(found.values())


@pytest.mark.parametrize("n_ranks", N_RANKS)
def test_every_collective_and_its_adjoint_on_cuda_tensors(pools, n_ranks):
    assert max(pools(n_ranks).run(gaps, timeout=120)) < ADJOINT


def network(comm, layout):
    """Energy, forces and stress of a network with a mid-network sum, first and second derivatives."""
    graph = RandomGraph(comm, n_systems=2, owners=UNEVEN, layout=layout)
    g = torch.Generator().manual_seed(3)
    x, numbers = torch.rand(graph.n, 3, dtype=F64, generator=g), torch.randint(0, 10, (graph.n,), generator=g)
    with torch.device(comm.device):
        leaf, strain = graph.nodes(x).requires_grad_(), torch.zeros(2, 3, 3, dtype=F64, requires_grad=True)
        scale = torch.tensor(1.1, dtype=F64)
        energy = equalised(leaf, graph.nodes(numbers), graph.local_edge_index, graph.local_batch, strain, 2, scale)
        forces, stress = torch.autograd.grad(energy.sum(), [leaf, strain], create_graph=True)
        loss = torch.zeros(2, dtype=F64).index_add_(0, graph.local_batch, (forces**2).sum(1)).sum() + (stress**2).sum()
        second = torch.autograd.grad(loss, [leaf, strain])
    plain = [t.as_subclass(torch.Tensor).detach().cpu() for t in (energy, stress, second[1])]
    return graph.mine, [graph.owned(t).detach() for t in (forces, second[0])], plain


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n_ranks", N_RANKS)
def test_every_layout_on_gpus_equals_one_process_on_the_cpu(pools, n_ranks, layout):
    _, per_node, per_system = network(Comm(), "owned")
    for mine, rows, whole in pools(n_ranks).run(network, layout, timeout=120):
        for found, expected in zip(rows, per_node, strict=True):
            torch.testing.assert_close(found, expected[mine], rtol=1e-11, atol=1e-11)
        for found, expected in zip(whole, per_system, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def steady_step(comm, layout):
    """Traffic of a second step, in which torch raises where the host waits for the device."""
    graph = RandomGraph(comm, layout=layout)
    x, h = torch.rand(graph.n, 3, dtype=F64), torch.rand(graph.n, 4, dtype=F64)
    static = graph.nodes(h)
    with torch.device(comm.device):
        for step in range(2):
            leaf = graph.nodes(x).requires_grad_()
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if step else "default")
            try:
                with count_traffic(comm) as traffic:
                    energy = layers(static, leaf, graph.local_edge_index, graph.local_batch, 3)
                    torch.autograd.grad(energy.sum(), leaf)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    return traffic


@pytest.mark.parametrize("layout", ["owned", "padded", "sharded", "exchanged"])
@pytest.mark.parametrize("n_ranks", [n for n in N_RANKS if n <= GPUS])
def test_a_steady_step_never_waits_for_the_device(pools, n_ranks, layout):
    for traffic in pools(n_ranks).run(steady_step, layout, timeout=120):
        assert traffic.host_syncs == 0
        assert traffic.reverses == (3 if n_ranks > 1 else 0)


SIDE = 4000.0


def scattered(n, side):
    return torch.rand(n, 3, dtype=F64, generator=torch.Generator().manual_seed(n)) * side


PLACES = {
    "gas": (scattered(3000, 40), torch.eye(3, dtype=F64) * 40, True, 5.0),
    "open": (scattered(500, 20), torch.zeros(3, 3, dtype=F64), False, 5.0),
    "2,000 neighbours each": (scattered(40, 4), torch.eye(3, dtype=F64) * 4, True, 9.5),
    "sheared": (scattered(200, 9), torch.tensor([[9.0, 0, 0], [6, 8, 0], [-5, 4, 7]], dtype=F64), True, 6.0),
    "far apart": (
        torch.tensor([[0, 0, SIDE - 1], [SIDE - 1, SIDE, 0], [1.0, 1, 1]], dtype=F64),
        torch.eye(3, dtype=F64) * SIDE,
        True,
        4.5,
    ),
}


def edges(comm, name):
    """Every edge by global ids, sorted."""
    positions, cell, pbc, cutoff = PLACES[name]
    mine = torch.arange(comm.rank, len(positions), comm.size)
    where = cell[None], torch.tensor([[pbc] * 3])
    device = comm.device
    on_device = (
        positions[mine].to(device),
        torch.zeros(len(mine), dtype=torch.long, device=device),
        *(t.to(device) for t in where),
    )
    routing, index, shifts = HaloStrategy().build_neighbour_list(*on_device, cutoff, comm)
    ids = routing.with_ghosts(mine.to(device))
    rows = torch.cat([ids[index.flip(0)].T, shifts.long()], dim=1).cpu()
    return comm.all_gather_rows(rows).unique(dim=0), sum(comm.gather_objects(len(rows)))


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("n_ranks", N_RANKS)
def test_edges_found_on_gpus_are_those_found_on_the_cpu(pools, n_ranks, name):
    expected, n = edges(Comm(), name)
    for found, count in pools(n_ranks).run(edges, name, timeout=120):
        assert count == n == len(found) and torch.equal(found, expected)


ENSEMBLES = {
    "nve": lambda: NVE(2.0),
    "langevin": lambda: Langevin(2.0, 200.0, seed=5),
    "nvt": lambda: NoseHooverChain(2.0, 200.0, damping=40.0),
    "npt": lambda: NPT(2.0, 200.0, pressure=0.003, damping=40.0, pressure_damping=100.0, shape="full"),
    "relax": lambda: FIRE(fmax=1e-5, cell="isotropic"),
}


def moving(comm, name, ensemble, mode="auto"):
    model, atoms = CASES[name]()
    config = DomainConfig(comm, compile=mode)
    batch = ShardedBatch.scatter(Batch.from_ase(atoms) if comm.rank == 0 else None, config)
    simulation = Simulation(Domain(DistributedModel(model.double(), config), batch, 0.4), ENSEMBLES[ensemble]())
    thermalize(simulation.state, 200.0, seed=1)
    return simulation


def trajectory(comm, name, ensemble):
    """Positions and cell after 40 steps, with fast atoms so that lists are rebuilt."""
    simulation = moving(comm, name, ensemble)
    simulation.state.velocities.mul_(3.0 if ensemble == "nve" else 1.0)
    simulation.run(40)
    state = simulation.state
    return simulation.domain.batch.gather(state.positions).cpu(), state.cell.cpu(), simulation.rebuilds


@pytest.mark.parametrize("ensemble", ENSEMBLES)
@pytest.mark.parametrize("name", ["lj", "mace"])
@pytest.mark.parametrize("n_ranks", N_RANKS)
def test_trajectories_on_gpus_equal_one_process_on_the_cpu(pools, n_ranks, name, ensemble):
    positions, cell, rebuilds = pools(1, "cpu").run(trajectory, name, ensemble)[0]
    assert rebuilds > 0 or ensemble != "nve"
    for result in pools(n_ranks).run(trajectory, name, ensemble, timeout=240):
        torch.testing.assert_close(result[0], positions, rtol=0, atol=1e-8)
        torch.testing.assert_close(result[1], cell, rtol=0, atol=1e-8)


def graphs(simulation):
    """Of a step: the integrator's halves and the evaluation."""
    return [*simulation.domain._evaluations.values(), simulation._first, simulation._second]


def block(comm, name, ensemble, mode):
    """Traffic of a step between rebuilds, in which torch raises where the host waits for the device, and what it allocates."""
    simulation = moving(comm, name, ensemble, mode)
    for _ in range(4):  # a cell that shrinks may need larger buffers meanwhile, and new graphs
        simulation.run(WARMUP_CALLS + 3)
        if mode == "off" or all(step.graph is not None for step in graphs(simulation)):
            break
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        with count_traffic(comm) as traffic:
            simulation._first()
            simulation._evaluate()
            simulation._second()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    made = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    recorded = mode == "capture" and all(step.graph is not None for step in graphs(simulation))
    return traffic, made, recorded, simulation.domain.why_eager


@pytest.mark.parametrize("mode", ["off", "capture"])
@pytest.mark.parametrize("ensemble", ["nve", "langevin", "nvt", "npt"])
@pytest.mark.parametrize(("name", "exchanges"), [("lj", 1), ("mace", 3)])
@pytest.mark.parametrize("n_ranks", [n for n in N_RANKS if n <= GPUS])
def test_a_step_between_rebuilds_never_waits_for_the_device(pools, n_ranks, name, exchanges, ensemble, mode):
    for traffic, made, recorded, why_eager in pools(n_ranks).run(block, name, ensemble, mode, timeout=120):
        assert traffic.host_syncs == 0 and traffic.exchanges == (exchanges if n_ranks > 1 else 0)
        if mode == "capture":  # one graph each, which needs no memory of its own any more
            assert recorded and made == 0, why_eager


def hot(comm, mode):
    """Case 14: silicon, 600 K, 60 steps with migration; what was recorded before the last 40, and after them."""
    atoms = bulk("Si", cubic=True) * (4, 4, 4)
    atoms.rattle(0.05, seed=1)
    atoms.numbers[::3] = 8
    config = DomainConfig(comm, compile=mode)
    batch = ShardedBatch.scatter(Batch.from_ase(atoms) if comm.rank == 0 else None, config)
    model = MACEWrapper(small_mace(4).requires_grad_(False)).double()
    simulation = Simulation(Domain(DistributedModel(model, config), batch, 0.3), NVE(2.0))
    thermalize(simulation.state, 600.0, seed=1)
    simulation.run(20)
    before, rebuilds = graphs(simulation) if mode == "capture" else [], simulation.rebuilds
    simulation.run(40)
    kept = mode == "off" or (graphs(simulation) == before and all(step.graph is not None for step in before))
    positions = simulation.domain.batch.gather(simulation.state.positions).cpu()
    return positions, kept, simulation.domain.recaptures, simulation.rebuilds - rebuilds


@pytest.mark.parametrize("n_ranks", [n for n in N_RANKS if n <= GPUS])
def test_case_14_nothing_is_captured_anew(pools, n_ranks):
    expected, *_ = pools(n_ranks).run(hot, "off", timeout=200)[0]
    for positions, kept, recaptures, rebuilds in pools(n_ranks).run(hot, "capture", timeout=200):
        assert kept and recaptures == 0 and rebuilds > 0
        torch.testing.assert_close(positions, expected, rtol=0, atol=1e-9)


def by_inductor(comm):
    """Energy and forces of a compiled step, after plain ones in which TorchScript may have fused; why it is not compiled."""
    model, atoms = MACEWrapper(small_mace(4).requires_grad_(False)).double(), silica(2)
    found, reasons = [], []
    for mode in ("off", "inductor"):
        config = DomainConfig(comm, compile=mode)
        batch = ShardedBatch.scatter(Batch.from_ase(atoms) if comm.rank == 0 else None, config)
        domain = Domain(DistributedModel(model, config), batch, 0.3)
        for _ in range(WARMUP_CALLS + 2):
            results = domain.evaluate()
        found.append((results["energy"].cpu(), domain.batch.gather(results["forces"]).cpu()))
        reasons.append((domain.why_eager, domain.why_uncompiled))
    return found, reasons[-1]


@pytest.mark.parametrize("n_ranks", [n for n in N_RANKS if n <= GPUS])
def test_inductor_compiles_what_torchscript_has_fused(pools, n_ranks):
    for (expected, results), reasons in pools(n_ranks).run(by_inductor, timeout=240):
        assert reasons == (None, None)
        for value, one in zip(results, expected, strict=True):
            torch.testing.assert_close(value, one, rtol=1e-10, atol=1e-10)
