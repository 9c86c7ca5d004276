"""How much of a step goes to prompts: chunked prefill that leaves running streams half of their speed.

Decoding earns credit, `SHARE` seconds a second; a chunk of a prompt is run when it can be paid for, and costs what it
took. So, over any while, prompts get no more time than decoding does, however many and however long they are.
With nothing to decode, prompts get it all. Rank 0 decides and tells the others, as only its clock counts.
"""

from __future__ import annotations

from collections.abc import Sequence

SHARE = 0.8  # below 1, since passes that alternate with prefill find colder caches than alone
SMOOTHING = 0.3  # weight of the newest measurement


class PrefillScheduler:
    """buckets: prefill chunk sizes of the plan, ascending."""

    def __init__(self, buckets: Sequence[int]) -> None:
        self._buckets = tuple(buckets)
        self._measured: dict[int, float] = {}
        self.credit = 0.0

    def allow(self, decoding: int, remaining: int) -> int:
        """Prompt tokens to prefill in the next step, in which `decoding` requests decode; `remaining`: tokens that
        the next prompt lacks, 0 where none waits."""
        if remaining <= 0:
            return 0
        affordable = [b for b in self._buckets if not decoding or self.seconds(b) <= self.credit]
        return min(self._best(affordable, remaining), remaining) if affordable else 0

    def _best(self, buckets: Sequence[int], remaining: int) -> int:
        """The bucket in which `remaining` tokens are done soonest; as long as they fill the largest, that one."""
        if remaining >= buckets[-1]:
            return buckets[-1]
        return min(buckets, key=lambda bucket: (self.seconds(bucket) * -(-remaining // bucket), -bucket))

    def observe(self, decoding: int, prefilled: int, prefill_seconds: float, step_seconds: float) -> None:
        """What the step came to: `prefilled` prompt tokens took `prefill_seconds` of its `step_seconds`."""
        if prefilled:
            bucket = next(b for b in self._buckets if b >= prefilled)
            before = self._measured.get(bucket, prefill_seconds)
            self._measured[bucket] = before + SMOOTHING * (prefill_seconds - before)
        if decoding:
            earned = SHARE * (step_seconds - prefill_seconds)
            # what is saved while no prompt waits comes as one stall: no more than the next chunk and this step's worth
            most = self.seconds(self._buckets[0]) + earned
            self.credit = min(self.credit + earned - prefill_seconds, most)

    def seconds(self, bucket: int) -> float:
        """Expected time of a chunk; of one not yet seen, in proportion to the nearest that was (0: none was)."""
        if bucket in self._measured or not self._measured:
            return self._measured.get(bucket, 0.0)
        nearest = min(self._measured, key=lambda known: abs(known - bucket))
        return self._measured[nearest] * bucket / nearest
