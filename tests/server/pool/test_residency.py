"""Tests of the scheduler of a pool, with a clock that only the simulation advances."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from mopd_server.pool.residency import Teacher, choose

BATCH_TOKENS = 1000
SECONDS_PER_TOKEN = 0.001  # a batch takes a second
SWAP_SECONDS = 3.0


@dataclass
class Simulation:
    """One device that scores one batch at a time; queues are in tokens."""

    resident: int
    max_wait: float
    teachers: dict[str, Teacher]
    now: float = 0.0
    queues: dict[str, list[tuple[float, int]]] = field(default_factory=dict)  # arrival, tokens
    waits: dict[str, list[float]] = field(default_factory=dict)
    swaps: int = 0

    def step(self) -> bool:
        """Run the next batch; False if none may run yet."""
        for name, queue in self.queues.items():
            teacher = self.teachers[name]
            arrived = [tokens for arrival, tokens in queue if arrival <= self.now]
            if arrived and teacher.waiting_since is None:
                teacher.waiting_since = queue[0][0]
            teacher.tokens = sum(arrived)
        grant = choose(
            self.teachers.values(), resident=self.resident, max_wait=self.max_wait, now=self.now
        )
        if grant is None:
            return False
        teacher = grant.teacher
        if grant.swap:
            assert not teacher.resident
            if grant.victim is not None:
                assert grant.victim.resident
                grant.victim.resident = False
            teacher.resident = True
            self.now += SWAP_SECONDS
            teacher.resident_since = self.now
            self.swaps += 1
        assert sum(each.resident for each in self.teachers.values()) <= self.resident
        arrival, tokens = self.queues[teacher.name].pop(0)
        self.waits.setdefault(teacher.name, []).append(self.now - arrival)
        self.now += tokens * SECONDS_PER_TOKEN
        teacher.last_used, teacher.waiting_since = self.now, None
        return True


def pool(names: str, resident: int, max_wait: float = 30.0) -> Simulation:
    teachers = {
        name: Teacher(name, seconds_per_token=SECONDS_PER_TOKEN, swap_seconds=SWAP_SECONDS)
        for name in names
    }
    return Simulation(resident, max_wait, teachers, queues={name: [] for name in names})


@pytest.mark.parametrize("resident", [1, 2])
@pytest.mark.parametrize("load", [0.5, 0.8])
def test_no_teacher_starves_and_swaps_stay_cheap_under_a_skew(resident: int, load: float) -> None:
    simulation = pool("abc", resident)
    arrivals = np.random.default_rng(0)
    count = 600
    times = np.cumsum(arrivals.exponential(1.0 / load, count))
    for time, name in zip(
        times, arrivals.choice(list("abc"), count, p=[0.9, 0.05, 0.05]), strict=True
    ):
        simulation.queues[str(name)].append((float(time), BATCH_TOKENS))
    while any(simulation.queues.values()):
        if not simulation.step():
            simulation.now += 0.25
    longest = max(max(waits) for waits in simulation.waits.values())
    assert sum(map(len, simulation.waits.values())) == count
    # An overdue batch waits for at most the running batch and the overdue ones before it.
    assert max(*simulation.waits["b"], *simulation.waits["c"]) <= 30 + 3 * (1 + SWAP_SECONDS)
    assert longest < 120
    assert simulation.swaps < count / 4


def test_two_busy_teachers_swap_after_several_times_the_cost_of_a_swap() -> None:
    simulation = pool("ab", 1, max_wait=1000.0)
    for name in "ab":
        simulation.queues[name] = [(0.0, BATCH_TOKENS)] * 200
    while any(simulation.queues.values()):
        assert simulation.step()
    assert simulation.now <= 400 * 1.25 + 2 * SWAP_SECONDS
    assert max(simulation.waits["a"]) > 0


def test_a_small_queue_waits_for_its_deadline_while_the_resident_is_busy() -> None:
    simulation = pool("ab", 1, max_wait=10.0)
    simulation.queues["a"] = [(0.0, BATCH_TOKENS)] * 50
    simulation.queues["b"] = [(0.5, 1)]
    while simulation.queues["b"]:
        assert simulation.step()
    assert 10.0 <= simulation.waits["b"][0] <= 10.0 + 1.0 + SWAP_SECONDS


def test_an_idle_teacher_is_replaced_at_once() -> None:
    simulation = pool("ab", 1)
    simulation.queues["a"] = [(0.0, BATCH_TOKENS)]
    assert simulation.step()
    simulation.queues["b"] = [(simulation.now, 1)]
    assert simulation.step()
    assert simulation.waits["b"] == [SWAP_SECONDS]
