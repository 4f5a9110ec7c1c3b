"""The OpenAI-compatible HTTP surface: bodies in, `EngineLike.generate` called, JSON or server-sent events out."""
