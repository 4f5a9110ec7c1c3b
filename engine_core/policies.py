"""The order in which waiting requests are admitted. A policy is a key, or for lpm a choice among the first few.

    fcfs       in order of arrival
    priority   lower number first; waiting `priority_aging_steps` steps is worth one level. The key is fixed at arrival
               (level * aging + step of arrival), since all who wait age alike: so nobody starves, a request keeps its
               rank for life, and two never take a seat from each other in turns
    lpm        longest cached prefix first, among the first LPM_WINDOW in order of arrival; whoever was overtaken
               `lpm_max_overtakes` times goes first

Queues are heaps: adding or taking one request costs O(log n) whatever waits. A preempted request keeps its key, so it
returns in front of those that came later. Knows no blocks: the scheduler tells lpm what the cache has.
Source of lpm: Zheng et al. 2024 (SGLang), with a bound on overtaking added.
"""
from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence

from engine_core.request import Request
from ipc.config import SchedulerConfig

Key = tuple[int, int]

LPM_WINDOW = 64


def make_key(config: SchedulerConfig) -> Callable[[Request], Key]:
    """The rank of a request under this policy; smaller goes first. It never changes while the request lives."""
    if config.policy == "priority":
        aging = config.priority_aging_steps
        return lambda request: (request.priority * aging + request.arrival_step, request.arrival)
    return lambda request: (0, request.arrival)


class WaitingQueue:
    """Waiting and preempted requests in policy order. Removing one is lazy: it stays in the heap until it surfaces."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.key = make_key(config)
        self._heap: list[tuple[Key, Request]] = []
        self._held: set[Request] = set()        # in the queue, but nobody's turn
        self._size = 0
        self.num_tokens = 0                     # of all that wait

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        held = [(self.key(request), request) for request in self._held]
        return (request for _, request in sorted(self._heap + held) if not request.is_finished)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def push(self, request: Request) -> None:
        self._enter(request)
        self._count(request, 1)

    def hold(self, requests: Sequence[Request]) -> None:
        """These, which wait, are passed over until `release`."""
        for request in requests:
            request.is_held = True
        self._held.update(requests)
        self._heap = [entry for entry in self._heap if not entry[1].is_held]
        heapq.heapify(self._heap)

    def release(self, request: Request) -> None:
        """A held request, which may have finished, takes its place again."""
        request.is_held = False
        if request in self._held:
            self._held.remove(request)
            self._enter(request)

    def _enter(self, request: Request) -> None:
        if request.is_held:
            self._held.add(request)
        else:
            heapq.heappush(self._heap, (self.key(request), request))

    def peek(self) -> Request | None:
        """The next request, or None."""
        heap = self._heap
        while heap and heap[0][1].is_finished:
            heapq.heappop(heap)
        return heap[0][1] if heap else None

    def pop(self, request: Request) -> None:
        """Take out what `peek` returned; at the cost of a rebuilt heap, any other request."""
        if self._heap and self._heap[0][1] is request:
            heapq.heappop(self._heap)
        else:
            self._remove(request)
        self._count(request, -1)

    def recount(self, request: Request) -> None:
        """A request that waits got the token that was computed when it was preempted."""
        self.num_tokens += request.num_known_tokens - request.num_queued_tokens
        request.num_queued_tokens = request.num_known_tokens

    def _remove(self, request: Request) -> None:
        kept = [entry for entry in self._heap if entry[1] is not request]
        if len(kept) + 1 != len(self._heap):
            raise RuntimeError(f"{request} does not wait")
        heapq.heapify(kept)
        self._heap = kept

    def discard(self, request: Request) -> None:
        """A queued request that has just been finished. Amortised O(1): the heap is rebuilt when half of it is dead."""
        self._count(request, -1)
        self._held.discard(request)
        if len(self._heap) > 64 and self._size * 2 < len(self._heap):
            self._heap = [entry for entry in self._heap if not entry[1].is_finished]
            heapq.heapify(self._heap)

    def _count(self, request: Request, change: int) -> None:
        self._size += change
        self.num_tokens += change * request.num_known_tokens if change > 0 else -request.num_queued_tokens
        request.num_queued_tokens = request.num_known_tokens if change > 0 else 0


class LongestPrefixQueue(WaitingQueue):
    """lpm. `cached_tokens` says how much of a request the cache has now; `version` changes whenever an answer may."""

    def __init__(self, config: SchedulerConfig, cached_tokens: Callable[[Request], int],
                 version: Callable[[], int]) -> None:
        super().__init__(config)
        self._max_overtakes = config.lpm_max_overtakes
        self._cached_tokens, self._version = cached_tokens, version
        self._window: list[Request] = []        # the first in order of arrival, taken out of the heap
        self._chosen: Request | None = None
        self._chosen_at = -1

    def __iter__(self) -> Iterator[Request]:
        yield from (request for request in self._window if not request.is_finished)
        yield from super().__iter__()

    def hold(self, requests: Sequence[Request]) -> None:
        for request in self._window:
            heapq.heappush(self._heap, (self.key(request), request))
        self._window, self._chosen = [], None
        super().hold(requests)

    def _enter(self, request: Request) -> None:
        super()._enter(request)
        if request.is_held:
            return
        window = self._window
        if window and request.arrival < window[-1].arrival:     # returns before some of the window: put those back
            for later in [r for r in window if r.arrival > request.arrival]:
                heapq.heappush(self._heap, (self.key(later), later))
            window[:] = [r for r in window if r.arrival < request.arrival]
        self._chosen = None

    def peek(self) -> Request | None:
        if self._chosen is not None and not self._chosen.is_finished and self._chosen_at == self._version():
            return self._chosen
        window = self._window = [request for request in self._window if not request.is_finished]
        while len(window) < LPM_WINDOW and (request := super().peek()) is not None:
            heapq.heappop(self._heap)
            window.append(request)
        if not window:
            return None
        first = window[0]
        if first.num_overtaken >= self._max_overtakes or first.num_preemptions:
            self._chosen = first
        else:
            self._chosen = max(window, key=lambda request: (self._cached_tokens(request), -request.arrival))
        self._chosen_at = self._version()
        return self._chosen

    def pop(self, request: Request) -> None:
        if request not in self._window:         # out of turn: nobody was overtaken by the policy
            super().pop(request)
            self._chosen = None
            return
        for earlier in self._window:
            if earlier is request:
                break
            earlier.num_overtaken += 1
        self._window.remove(request)
        self._chosen = None
        self._count(request, -1)

    def discard(self, request: Request) -> None:
        super().discard(request)
        self._chosen = None                     # the window has room for another, which may be the better choice
