"""Discrete-event simulation of a teacher's replicas: client, queues, batches and service times.

The client sends at most ``max_concurrency`` requests at once, each to a replica that it chooses as
``mopd_client.transport.balance`` does. A replica computes one batch at a time: when it is idle, its
queued sequences form the next batch in order of arrival, up to ``max_batch_tokens``, as
``mopd_server.scoring.batching`` does. A batch takes ``batch_seconds``, and ``token_seconds`` for
each token that is computed: prompts of a batch count once, and not at all while they are among the
``cached_prompts`` that the replica computed last.
"""

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import numpy as np
from numpy.typing import NDArray

#: Of ``mopd_client.transport.balance``: load, as a multiple of the mean, above which a replica gets
#: no request for its cache's sake, and tokens after which a prompt is not expected in a cache.
BUSIEST = 2.0
BATCH_TOKENS = 16_384
CACHED_TOKENS = 2**18


@dataclass(frozen=True)
class ServiceTimes:
    """Seconds of a batch, and of a request outside of queue and batch."""

    batch_seconds: float
    token_seconds: float  # for each computed token
    request_seconds: float = 0.0  # half before the queue, half after the batch
    row_seconds: float = 0.0  # after the batch, for each completion token


@dataclass(frozen=True)
class Fleet:
    """Replicas of one teacher, and the limits of the client and of a batch."""

    replicas: int
    max_batch_tokens: int = 16_384
    max_concurrency: int = 32
    cached_prompts: int = 0


@dataclass(frozen=True)
class ScoredSequence:
    """One completion of a prompt."""

    prompt: int  # number
    prompt_tokens: int
    completion_tokens: int

    @property
    def tokens(self) -> int:
        """Prompt and completion tokens."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Request:
    """Sequences that the client sends together."""

    arrival: float  # seconds
    sequences: tuple[ScoredSequence, ...]

    @property
    def rows(self) -> int:
        """Completion tokens."""
        return sum(each.completion_tokens for each in self.sequences)

    @property
    def tokens(self) -> int:
        """Prompt and completion tokens."""
        return sum(each.tokens for each in self.sequences)


@dataclass(frozen=True)
class Batch:
    """One forward pass of a replica."""

    replica: int
    start: float
    end: float
    sequences: int
    tokens: int  # prompts of all sequences included
    computed_tokens: int


@dataclass
class Served:
    """Times of one request; ``started`` is that of its last sequence."""

    request: Request
    sent: float
    replica: int
    queued: float = 0.0
    started: float = 0.0
    finished: float = 0.0
    missing: int = 0  # sequences without a result

    @property
    def slot_seconds(self) -> float:
        """Wait for one of the client's slots."""
        return self.sent - self.request.arrival

    @property
    def queue_seconds(self) -> float:
        """Wait in the replica's queue, as the service reports it."""
        return self.started - self.queued


@dataclass(frozen=True)
class Outcome:
    """Requests in order of completion, and batches in order of start."""

    served: Sequence[Served]
    batches: Sequence[Batch]
    replicas: int

    @property
    def seconds(self) -> float:
        """From the first arrival to the last response."""
        return max(s.finished for s in self.served) - min(s.request.arrival for s in self.served)

    @property
    def rows_per_second(self) -> float:
        """Scored completion tokens per second."""
        return sum(s.request.rows for s in self.served) / self.seconds

    @property
    def queue_seconds(self) -> NDArray[np.float64]:
        """Wait of each request in a replica's queue."""
        return np.array([each.queue_seconds for each in self.served])

    @property
    def prompts_computed(self) -> float:
        """Prompt tokens that replicas computed, as a multiple of those of all prompts."""
        sequences = [each for served in self.served for each in served.request.sequences]
        prompts = {each.prompt: each.prompt_tokens for each in sequences}
        computed = sum(batch.computed_tokens for batch in self.batches)
        return (computed - sum(s.request.rows for s in self.served)) / sum(prompts.values())

    @property
    def utilisation(self) -> list[float]:
        """Share of the time for which each replica computed."""
        busy = [0.0] * self.replicas
        for batch in self.batches:
            busy[batch.replica] += batch.end - batch.start
        return [each / self.seconds for each in busy]


@dataclass(eq=False)
class _Replica:
    number: int
    queue: deque[tuple[ScoredSequence, Served]] = field(
        default_factory=deque[tuple[ScoredSequence, Served]]
    )
    in_flight: int = 0  # tokens
    sent: int = 0  # tokens of all requests
    busy: bool = False
    prompts: OrderedDict[int, None] = field(default_factory=OrderedDict[int, None])  # oldest first


class _Balance:
    """Replica of a request: that with its prompts in the cache, or the fewest tokens in flight."""

    def __init__(self, replicas: Sequence[_Replica]) -> None:
        self._replicas = replicas
        self._places: dict[int, tuple[_Replica, int]] = {}  # and its tokens sent until then

    def choose(self, request: Request) -> _Replica:
        prompts = {each.prompt for each in request.sequences}
        places = (self._places.get(prompt) for prompt in prompts)
        cached = Counter(
            place[0] for place in places if place and place[0].sent - place[1] <= CACHED_TOKENS
        )
        mean = (sum(each.in_flight for each in self._replicas) + request.tokens) / len(
            self._replicas
        )
        replica = max(cached, key=cached.__getitem__, default=None)
        if replica is None or replica.in_flight > BUSIEST * mean + BATCH_TOKENS:
            replica = min(self._replicas, key=lambda each: (each.in_flight, each.sent))
        replica.in_flight += request.tokens
        replica.sent += request.tokens
        self._places.update(dict.fromkeys(prompts, (replica, replica.sent)))
        return replica


def simulate(requests: Sequence[Request], times: ServiceTimes, fleet: Fleet) -> Outcome:
    """Return the times of all requests and batches; deterministic."""
    return _Simulation(times, fleet).run(requests)


class _Simulation:
    def __init__(self, times: ServiceTimes, fleet: Fleet) -> None:
        self._times, self._fleet = times, fleet
        self._balance = _Balance([_Replica(number) for number in range(fleet.replicas)])
        self._waiting: deque[Request] = deque()
        self._free_slots = fleet.max_concurrency
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._now = 0.0
        self._served: list[Served] = []
        self._batches: list[Batch] = []

    def run(self, requests: Sequence[Request]) -> Outcome:
        for request in requests:
            self._at(request.arrival, partial(self._arrive, request))
        while self._events:
            self._now, _, event = heapq.heappop(self._events)
            event()
        return Outcome(self._served, self._batches, self._fleet.replicas)

    def _at(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (seconds, next(self._order), event))

    def _arrive(self, request: Request) -> None:
        self._waiting.append(request)
        self._send()

    def _send(self) -> None:
        while self._waiting and self._free_slots:
            self._free_slots -= 1
            request = self._waiting.popleft()
            replica = self._balance.choose(request)
            served = Served(request, self._now, replica.number, missing=len(request.sequences))
            delay = self._times.request_seconds / 2
            self._at(self._now + delay, partial(self._enqueue, replica, served))

    def _enqueue(self, replica: _Replica, served: Served) -> None:
        served.queued = self._now
        replica.queue.extend((sequence, served) for sequence in served.request.sequences)
        if not replica.busy:
            self._start(replica)

    def _start(self, replica: _Replica) -> None:
        """Start the next batch, if any sequence waits."""
        replica.busy = bool(replica.queue)
        if not replica.queue:
            return
        members = [replica.queue.popleft()]
        tokens = members[0][0].tokens
        while replica.queue:
            tokens += replica.queue[0][0].tokens
            if tokens > self._fleet.max_batch_tokens:
                break
            members.append(replica.queue.popleft())
        computed = self._computed_tokens(replica, [sequence for sequence, _ in members])
        seconds = self._times.batch_seconds + self._times.token_seconds * computed
        total = sum(sequence.tokens for sequence, _ in members)
        end = self._now + seconds
        self._batches.append(Batch(replica.number, self._now, end, len(members), total, computed))
        for _, served in members:
            served.started = self._now
        self._at(end, partial(self._finish, replica, [served for _, served in members]))

    def _computed_tokens(self, replica: _Replica, batch: Sequence[ScoredSequence]) -> int:
        prompts = {each.prompt: each.prompt_tokens for each in batch}
        computed = sum(each.completion_tokens for each in batch)
        computed += sum(n for prompt, n in prompts.items() if prompt not in replica.prompts)
        for prompt in prompts:
            replica.prompts[prompt] = None
            replica.prompts.move_to_end(prompt)
        while len(replica.prompts) > self._fleet.cached_prompts:
            replica.prompts.popitem(last=False)
        return computed

    def _finish(self, replica: _Replica, members: Sequence[Served]) -> None:
        for served in members:
            served.missing -= 1
            if not served.missing:
                delay = (
                    self._times.request_seconds / 2 + self._times.row_seconds * served.request.rows
                )
                self._at(self._now + delay, partial(self._receive, replica, served))
        self._start(replica)

    def _receive(self, replica: _Replica, served: Served) -> None:
        served.finished = self._now
        replica.in_flight -= served.request.tokens
        self._free_slots += 1
        self._served.append(served)
        self._send()
