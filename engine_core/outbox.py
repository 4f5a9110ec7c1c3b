"""What the core has to tell each frontend, collected until its socket takes it.

A frontend that cannot take more costs nobody else anything: its outputs join here. Knows no sockets.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ipc.messages import EMPTY, STAMPS, Admitted, Finished, Outputs
from ipc.step_ring import RING_STEPS, StepRing

if TYPE_CHECKING:
    from engine_core.core import EngineCore


STEP, COMMIT_BEGIN, COMMIT_END, OUTPUTS_SENT = (STAMPS.index(name) for name in (
    "step", "commit_begin", "commit_end", "outputs_sent"))
NUMBER_SHIFT = 40                               # request_id = frontend number << 40 | counter
TELL_NS = 150_000_000                           # a busy frontend is told of steps this often, all at once


class _Pending:
    """News for one frontend."""

    __slots__ = ("columns", "admitted", "finished", "extras", "told_ns")

    def __init__(self) -> None:
        self.columns: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []     # ids int64, index int64, tokens int32
        self.admitted: list[Admitted] = []
        self.finished: list[Finished] = []
        self.extras: dict[str, list[Any]] = {}  # field of Outputs -> entries
        self.told_ns = -1                       # when stamps were put in; -1: none are in it

    def __bool__(self) -> bool:
        return bool(self.columns or self.admitted or self.finished or self.extras)


class Outbox:
    """News per frontend number, in the order of events."""

    def __init__(self) -> None:
        self._pending: dict[int, _Pending] = {}
        self.ring = StepRing()                  # the last steps, also those on their way
        self._last = 0                          # step committed last
        self._gap = 0                           # committed last of those whose predecessor was not
        self._is_open = False                   # when its commit ended is not known yet
        self._sent = 0                          # step whose row is complete: some frontend was sent it
        self.is_recording = True                # False: no stamps leave; `bench overhead` measures what that saves
        self._told: dict[int, tuple[int, int]] = {}     # frontend number -> the last step it knows, when it was told

    def _of(self, number: int) -> _Pending:
        pending = self._pending.get(number)
        if pending is None:
            pending = self._pending[number] = _Pending()
        return pending

    def admitted(self, news: Admitted, number: int) -> None:
        self._of(number).admitted.append(news)

    def finished(self, news: Finished, number: int) -> None:
        self._of(number).finished.append(news)

    def extra(self, number: int, field: str, entry: Any) -> None:
        """Log-probabilities or a vector, for the list of this name in Outputs."""
        self._of(number).extras.setdefault(field, []).append(entry)

    def tokens(self, ids: np.ndarray, index: np.ndarray, tokens: np.ndarray) -> None:
        if not ids.size:
            return
        numbers = ids >> NUMBER_SHIFT
        first = int(numbers[0])
        if (numbers == first).all():
            self._of(first).columns.append((ids, index, tokens))
            return
        for number in np.unique(numbers).tolist():
            mine = numbers == number
            self._of(number).columns.append((ids[mine], index[mine], tokens[mine]))

    def forget(self, number: int) -> None:
        self._pending.pop(number, None)
        self._told.pop(number, None)

    def take(self, core: EngineCore, now_ns: int) -> list[tuple[int, Outputs]]:
        """One Outputs per frontend with news. They stay pending until `sent`."""
        found = []
        is_over = not core.scheduler.rows.n     # no message may follow soon
        for number, pending in self._pending.items():
            if not pending:
                continue
            outputs = core.fill(Outputs(0))
            if pending.columns:
                if len(pending.columns) == 1:
                    ids, index, tokens = pending.columns[0]
                else:
                    ids, index, tokens = (np.concatenate(c) for c in zip(*pending.columns))
                outputs.request_ids = ids.data.cast("B")
                outputs.output_index = index.astype(np.int32).data.cast("B")
                outputs.tokens = np.ascontiguousarray(tokens).data.cast("B")
            outputs.admitted, outputs.finished = pending.admitted, pending.finished
            for field, entries in pending.extras.items():
                setattr(outputs, field, entries)
            _, told_ns = self._told.get(number, (0, -TELL_NS))
            if is_over or now_ns - told_ns >= TELL_NS:
                outputs.stamps, pending.told_ns = self.steps_for(number, now_ns), now_ns
            else:
                self._left(now_ns)
                pending.told_ns = -1
            found.append((number, outputs))
        return found

    def sent(self, number: int) -> None:
        pending = self._pending.pop(number, None)
        if pending is not None and pending.told_ns >= 0:
            self.told(number, pending.told_ns)

    def told(self, number: int, now_ns: int) -> None:
        """This frontend knows all steps until now."""
        self._told[number] = self._last, now_ns

    def planned(self, step: int, stamps: tuple[int, ...]) -> None:
        """A step is on its way to the worker: its row so far."""
        if self.is_recording:
            self.ring.put(step, stamps)

    def step(self, step: int, stamps: tuple[int, ...]) -> None:
        """A step was committed; when its news left is filled in then."""
        if self.is_recording:
            self.ring.put(step, stamps)
            if step != self._last + 1:
                self._gap = step
            self._last, self._is_open = step, True

    def commit_ended(self, now_ns: int) -> None:
        if self.is_recording and self._is_open:
            self.ring.mark(self._last, COMMIT_END, now_ns)
            self._is_open = False

    def _left(self, now_ns: int) -> None:
        """News of every step until now are leaving."""
        last = self._last
        if self._is_open:
            self.commit_ended(now_ns)
        for step in range(max(self._sent, last - RING_STEPS) + 1, last + 1):
            self.ring.mark(step, OUTPUTS_SENT, now_ns)
        self._sent = last

    def steps_for(self, number: int, now_ns: int) -> memoryview:
        """The stamps of the steps that this frontend does not know yet, as far as the ring has them."""
        self._left(now_ns)
        last, told = self._last, max(self._told.get(number, (0, 0))[0], self._last - RING_STEPS)
        if told >= last:
            return EMPTY
        if told + 1 >= self._gap:
            return memoryview(self.ring.part(told + 1, last))
        recent = np.frombuffer(self.ring.part(told + 1, last), np.int64).reshape(-1, len(STAMPS))
        known = (recent[:, STEP] > told) & (recent[:, COMMIT_BEGIN] > 0)    # others failed, or were not recorded
        return memoryview(recent[known].tobytes())
