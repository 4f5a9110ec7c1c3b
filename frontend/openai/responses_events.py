"""The events of a streamed response, numbered from 0, in OpenAI's order. Knows no engine."""
from __future__ import annotations

from typing import Any

import msgspec

from frontend.openai import sse
from frontend.openai.responses_protocol import OutputMessage, OutputText, ResponseBody


class ResponseEvents:
    """One stream. Each method returns the bytes of its events; `body` is what the caller changes as it goes."""

    def __init__(self, body: ResponseBody, item_id: str) -> None:
        self.body = body
        self._item_id = item_id
        self._number = 0
        place = msgspec.json.encode({"item_id": item_id, "output_index": 0, "content_index": 0})[1:-1]
        name = b"response.output_text.delta"
        self._delta_head = (b"event: " + name + b'\ndata: {"type":"' + name + b'",' + place
                            + b',"logprobs":[],"sequence_number":')

    def _event(self, name: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return sse.named_event(name, msgspec.json.encode({"type": name, "sequence_number": number, **fields}))

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def start(self) -> bytes:
        """Before the first text."""
        item = OutputMessage(self._item_id, "in_progress", [])
        return (self._event("response.created", response=self.body)
                + self._event("response.in_progress", response=self.body)
                + self._event("response.output_item.added", output_index=0, item=item)
                + self._event("response.content_part.added", **self._place(), part=OutputText("")))

    def delta(self, text: str) -> bytes:
        """New text: the hot path."""
        number, self._number = self._number, self._number + 1
        return self._delta_head + b'%d,"delta":' % number + sse.json_text(text) + b"}\n\n"

    def end(self, text: str) -> bytes:
        """After the last text; `body` has the whole answer by now."""
        [item] = self.body.output
        return (self._event("response.output_text.done", **self._place(), text=text, logprobs=[])
                + self._event("response.content_part.done", **self._place(), part=item.content[0])
                + self._event("response.output_item.done", output_index=0, item=item)
                + self._event(f"response.{self.body.status}", response=self.body))

    def failed(self) -> bytes:
        """Instead of the rest; `body` has the error."""
        return self._event("response.failed", response=self.body)
