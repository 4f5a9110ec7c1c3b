"""The order in which waiting requests are admitted. A policy is a key function; adding one means adding a line here.

The queue is a heap: adding or taking one request costs O(log n) whatever waits. A request that was preempted keeps its
arrival number, so it returns in front of those that came later. Knows no blocks.
"""
from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from engine_core.request import Request

Key = tuple[int, int]

POLICIES: dict[str, Callable[[Request], Key]] = {
    "fcfs": lambda request: (0, request.arrival),
    "priority": lambda request: (request.priority, request.arrival),
}


class WaitingQueue:
    """Waiting and preempted requests in policy order. Removing one is lazy: it stays in the heap until it surfaces."""

    def __init__(self, policy: str) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy {policy!r}; known are {', '.join(POLICIES)}")
        self.key = POLICIES[policy]
        self._heap: list[tuple[Key, Request]] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in sorted(self._heap) if not request.is_finished)

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (self.key(request), request))
        self._size += 1

    def peek(self) -> Request | None:
        """The next request, or None."""
        heap = self._heap
        while heap and heap[0][1].is_finished:
            heapq.heappop(heap)
        return heap[0][1] if heap else None

    def pop(self) -> Request:
        request = self.peek()
        if request is None:
            raise RuntimeError("pop from an empty waiting queue")
        heapq.heappop(self._heap)
        self._size -= 1
        return request

    def discard(self, request: Request) -> None:
        """A queued request that has just been finished. Amortised O(1): the heap is rebuilt when half of it is dead."""
        self._size -= 1
        if len(self._heap) > 64 and self._size * 2 < len(self._heap):
            self._heap = [entry for entry in self._heap if not entry[1].is_finished]
            heapq.heapify(self._heap)
