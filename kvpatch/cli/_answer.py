"""One streamed answer: text as it comes, and what it cost."""

import sys
import time
from dataclasses import asdict, dataclass

from transformers import TextStreamer


class Streamed(TextStreamer):
    """Collects the answer's text, and writes it to standard output if asked to.

    The first tokens wait for a few more: the step that makes them compiles, and half a sentence that hangs is worse
    than none.
    """

    WAITS_FOR = 3

    def __init__(self, tokenizer, begin, echo: bool):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.begin, self.echo, self.text, self.times, self._held = begin, echo, "", [], ""

    def put(self, value) -> None:
        """Called by generate for the prompt and for every token."""
        self.times.append(time.perf_counter())
        if self.tokens == self.WAITS_FOR:
            self._write()
        super().put(value)

    @property
    def tokens(self) -> int:
        """Tokens that came so far."""
        return len(self.times) - 1

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Called with whole words."""
        self.text += text
        self._held += text
        if stream_end or self.tokens > self.WAITS_FOR:
            if stream_end and not self.text.endswith("\n"):
                self._held += "\n"
            self._write()

    def _write(self) -> None:
        self.begin()
        if self.echo:
            sys.stdout.write(self._held)
            sys.stdout.flush()
        self._held = ""


@dataclass(frozen=True)
class Cost:
    """What an answer cost; rates leave compilation out, bytes are of the cache's buffers."""

    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float
    prefill_tokens_per_second: float
    decode_tokens_per_second: float | None
    compile_seconds: float
    compiles: int
    recompiles: int
    held: int
    evicted: int
    cache_bytes: int
    peak_cache_bytes: int
    full_cache_bytes: int

    @classmethod
    def of(cls, handle, streamed: Streamed, prompt_tokens: int, seen: int, compiled_before: float) -> "Cost":
        """Of the last generation of a handle's model.

        Args:
            prompt_tokens: that were read now.   seen: all tokens of the conversation.
            compiled_before: the handle's seconds of compiling before it.
        """
        from kvpatch import explain

        stats = handle.stats
        compiling = stats.compile_seconds - compiled_before
        steps, seconds = streamed.tokens - 1, streamed.times[-1] - streamed.times[1] - compiling
        return cls(
            prompt_tokens=prompt_tokens,
            new_tokens=streamed.tokens,
            prefill_seconds=stats.prefill_seconds,
            prefill_tokens_per_second=prompt_tokens / max(stats.prefill_seconds, 1e-9),
            decode_tokens_per_second=steps / seconds if steps > 0 and seconds > 0 else None,
            compile_seconds=compiling,
            compiles=stats.compiles,
            recompiles=stats.recompiles,
            held=stats.held,
            evicted=stats.evicted,
            cache_bytes=stats.cache_bytes,
            peak_cache_bytes=stats.peak_cache_bytes,
            full_cache_bytes=(seen - 1) * explain(handle.model).bytes_per_token,
        )

    def to_dict(self) -> dict:
        """Plain values."""
        return asdict(self)

    def __str__(self) -> str:
        rate = "-" if self.decode_tokens_per_second is None else f"{self.decode_tokens_per_second:,.1f}"
        share = self.cache_bytes / max(self.full_cache_bytes, 1)
        return "\n".join(
            (
                f"prefill   {self.prompt_tokens:,} tokens in {self.prefill_seconds:.2f} s "
                f"({self.prefill_tokens_per_second:,.0f} tok/s)",
                f"decode    {self.new_tokens:,} tokens, {rate} tok/s without {self.compile_seconds:.1f} s of compiling",
                f"cache     {self.held:,} tokens held, {self.evicted:,} evicted; {self.cache_bytes / 2**20:.1f} MiB, "
                f"{share:.0%} of the {self.full_cache_bytes / 2**20:.1f} MiB that all tokens take",
            )
        )
