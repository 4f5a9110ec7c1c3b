"""The events of a streamed response, numbered from 0, in OpenAI's order. Knows no engine."""
from __future__ import annotations

from frontend.openai.responses_items import OutputItems
from frontend.openai.responses_protocol import ResponseBody


class ResponseEvents:
    """What a stream tells besides its items. `body` is what the caller changes as it goes."""

    def __init__(self, body: ResponseBody, items: OutputItems) -> None:
        self.body, self.items = body, items

    def start(self) -> bytes:
        """Before the first item."""
        return (self.items.event("response.created", response=self.body)
                + self.items.event("response.in_progress", response=self.body))

    def end(self) -> bytes:
        """After the last item; `body` has the whole answer by now."""
        return self.items.event(f"response.{self.body.status}", response=self.body)

    def failed(self) -> bytes:
        """Instead of the rest; `body` has the error."""
        return self.items.event("response.failed", response=self.body)
