"""One answer as it comes: its text, and the figures people ask for (TTFT, tok/s, cached tokens).

Knows no terminal and no source; times are time.monotonic().
"""
from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator

from frontend.cli.source import Piece


@dataclasses.dataclass
class Answer:
    """Filled by `follow`. Counts of -1: the server did not say."""
    text: str = ""
    reasoning: str = ""
    num_prompt_tokens: int = -1
    num_cached_tokens: int = -1
    num_output_tokens: int = 0
    finish_reason: str | None = None
    is_stopped: bool = False                     # by the user
    began: float = dataclasses.field(default_factory=time.monotonic)
    first_at: float = 0.0                        # 0: no token yet
    last_at: float = 0.0

    def follow(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """The same pieces, counted."""
        for piece in pieces:
            now = time.monotonic()
            if piece.text or piece.reasoning:
                self.first_at = self.first_at or now
                self.last_at = now
            self.text += piece.text
            self.reasoning += piece.reasoning
            self.num_prompt_tokens = max(self.num_prompt_tokens, piece.num_prompt_tokens)
            self.num_cached_tokens = max(self.num_cached_tokens, piece.num_cached_tokens)
            self.num_output_tokens = max(self.num_output_tokens, piece.num_output_tokens)
            self.finish_reason = piece.finish_reason or self.finish_reason
            yield piece

    @property
    def ttft_s(self) -> float:
        return self.first_at - self.began if self.first_at else 0.0

    @property
    def tokens_per_s(self) -> float:
        """1 / TPOT; 0 before the second token."""
        seconds = self.last_at - self.first_at
        return (self.num_output_tokens - 1) / seconds if self.num_output_tokens > 1 and seconds > 0 else 0.0

    def figures(self) -> str:
        """One line for people."""
        if not self.first_at:
            state = "stopped before" if self.is_stopped else "no text" if self.finish_reason else "waiting for"
            waited = f"{time.monotonic() - self.began:.1f} s"
            return f"{state}, {waited}" if self.finish_reason else f"{state} the first token, {waited}"
        parts = [f"{self.num_output_tokens} tokens", f"{self.tokens_per_s:.1f} tok/s",
                 f"TTFT {self.ttft_s * 1000:.0f} ms"]
        if self.num_prompt_tokens >= 0:
            cached = f", {self.num_cached_tokens} cached" if self.num_cached_tokens >= 0 else ""
            parts.append(f"prompt {self.num_prompt_tokens}{cached}")
        if self.is_stopped:
            parts.append("stopped")
        elif self.finish_reason not in (None, "stop"):
            parts.append(f"ended by {self.finish_reason}")
        return " · ".join(parts)
