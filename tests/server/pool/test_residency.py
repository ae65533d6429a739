"""Tests of the scheduler of a pool, with a clock that only the simulation advances."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from mopd_server.pool.residency import LINGER_SWAPS, STAY_SWAPS, Teacher, choose
from mopd_server.settings import ListenSettings, PoolSettings

BATCH_TOKENS = 1000
SECONDS_PER_TOKEN = 0.001  # a batch takes a second
SWAP_SECONDS = 3.0
RESTART_SECONDS = 45.0  # a swap that starts vLLM's processes


@dataclass
class Simulation:
    """One device that scores one batch at a time; queues are in tokens."""

    resident: int
    max_wait: float
    teachers: dict[str, Teacher]
    swap_seconds: float = SWAP_SECONDS
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
            self.now += self.swap_seconds
            teacher.resident_since = self.now
            self.swaps += 1
        assert sum(each.resident for each in self.teachers.values()) <= self.resident
        arrival, tokens = self.queues[teacher.name].pop(0)
        self.waits.setdefault(teacher.name, []).append(self.now - arrival)
        self.now += tokens * SECONDS_PER_TOKEN
        teacher.last_used, teacher.waiting_since = self.now, None
        return True


def pool(
    names: str, resident: int, max_wait: float = 30.0, swap_seconds: float = SWAP_SECONDS
) -> Simulation:
    teachers = {
        name: Teacher(name, seconds_per_token=SECONDS_PER_TOKEN, swap_seconds=swap_seconds)
        for name in names
    }
    queues: dict[str, list[tuple[float, int]]] = {name: [] for name in names}
    return Simulation(resident, max_wait, teachers, swap_seconds, queues=queues)


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


@pytest.mark.parametrize("swap_seconds", [1.0, RESTART_SECONDS])
def test_a_small_queue_waits_for_its_deadline_while_the_resident_is_busy(
    swap_seconds: float,
) -> None:
    simulation = pool("ab", 1, max_wait=10.0, swap_seconds=swap_seconds)
    simulation.queues["a"] = [(0.0, BATCH_TOKENS)] * 500
    simulation.queues["b"] = [(0.5, 1)]
    while simulation.queues["b"]:
        assert simulation.step()
    deadline = max(10.0, STAY_SWAPS * swap_seconds)
    assert deadline <= simulation.waits["b"][0] <= deadline + 1.0 + swap_seconds


@pytest.mark.parametrize("resident", [1, 2])
def test_restarts_starve_no_teacher_and_leave_two_thirds_of_the_time(resident: int) -> None:
    """All of three teachers are busy without a pause, with the default settings."""
    wait = PoolSettings().max_wait_seconds
    simulation = pool("abc", resident, wait, RESTART_SECONDS)
    while simulation.now < 10_000:
        for queue in simulation.queues.values():
            if not queue:  # a client sends a batch when it has the response to the last one
                queue.append((simulation.now, BATCH_TOKENS))
        assert simulation.step()
    longest = max(max(waits) for waits in simulation.waits.values())
    assert longest < ListenSettings().request_timeout_seconds
    assert simulation.swaps * RESTART_SECONDS <= simulation.now / 3


def test_clients_of_one_request_at_a_time_do_not_swap_at_each_of_them() -> None:
    simulation = pool("ab", 1, swap_seconds=RESTART_SECONDS)
    pause = LINGER_SWAPS * RESTART_SECONDS / 2
    for name in "ab":
        simulation.queues[name] = [(0.0, BATCH_TOKENS)]
    served = 0
    while served < 1000:
        if not simulation.step():
            simulation.now += 0.1
        for queue in simulation.queues.values():
            if not queue:
                queue.append((simulation.now + pause, BATCH_TOKENS))
                served += 1
    assert simulation.swaps < 50


def test_an_idle_teacher_is_replaced_after_a_pause() -> None:
    simulation = pool("ab", 1)
    simulation.queues["a"] = [(0.0, BATCH_TOKENS)]
    assert simulation.step()
    arrival = simulation.now
    simulation.queues["b"] = [(arrival, 1)]
    assert not simulation.step()
    pause = 1.5 * LINGER_SWAPS * SWAP_SECONDS
    simulation.now += pause
    assert simulation.step()
    assert simulation.waits["b"] == [pytest.approx(pause + SWAP_SECONDS)]


def test_resident_teachers_score_while_another_one_is_loaded() -> None:
    """Engines in separate processes: one swap at a time, never of a running teacher."""
    a, b, c, d = (Teacher(name, resident=name in "ab", swap_seconds=10.0) for name in "abcd")
    now = 1000.0

    def grant() -> tuple[str, str | None] | None:
        chosen = choose((a, b, c, d), resident=2, max_wait=30.0, now=now, concurrent=True)
        return chosen and (chosen.teacher.name, chosen.victim and chosen.victim.name)

    a.running = b.running = True
    c.waiting_since = d.waiting_since = 0.0  # overdue
    assert grant() is None
    b.running, b.waiting_since = False, now
    assert grant() == ("c", "b")
    b.resident, c.resident, c.running, c.loading = False, True, True, True
    b.waiting_since = c.waiting_since = None
    assert grant() is None
    a.running, a.waiting_since = False, now
    assert grant() == ("a", None)
