"""A toy engine for tests of the step loop: no transformer, but everything that speculation can get wrong.

The "KV cache" stores tokens and positions; the next token's logits are a hash of all tokens that a row
sees through the block table and the mask. So a wrong slot, mask bit, position, length or compaction changes
the text. The drafter's context is checked entry by entry before each draft. Sampling, tree building, acceptance
and compaction are the real plugins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from engine_runtime.budget import Speculation
from engine_runtime.decoder import Decoder, Event
from engine_runtime.executor.cpu import SingleRank
from engine_runtime.generation import GenerationRequest
from engine_runtime.sampling import SamplingParams
from plugins.core.plan import Phase, Plan
from plugins.core.plugin import get_plugin
from plugins.core.splat import hash32
from plugins.core.state import Limits, request_buffers, result_buffers, row_buffers, vocabulary_buffers
from plugins.core.torch_dtypes import TORCH_DTYPES

VOCAB = 48
EOS = 7
SCALE = 10.0  # spread of the toy's logits: peaked enough that a good drafter is often right at temperature 1
GREEDY, TREE = SamplingParams(), Speculation()

# (executor, request slot, context tokens with the anchor last)
#     -> logits [D, K] descending, ids [D, K], logsumexp of all logits [D]
Drafter = Callable[["ToyExecutor", int, list[int]], tuple[np.ndarray, np.ndarray, np.ndarray]]


def mix(tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """uint32 hash of tokens at positions; their sum (mod 2^32) stands for the whole context."""
    with np.errstate(over="ignore"):
        key = tokens.astype(np.uint32) * np.uint32(0x9E3779B1) + positions.astype(np.uint32)
    return hash32(key, 0x51ED270B)


def logits_of(checksums: np.ndarray, vocab: int = VOCAB) -> np.ndarray:
    """float32 [n, vocab] of uint32 [n] context checksums."""
    bits = hash32(np.arange(vocab, dtype=np.uint32)[None, :] + hash32(checksums, 1)[:, None], 2)
    return (bits.astype(np.float32) / np.float32(2**32)) ** 2 * np.float32(SCALE)


def ask(prompt: Sequence[int], params: SamplingParams = GREEDY, speculation: Speculation = TREE) -> GenerationRequest:
    return GenerationRequest(tuple(prompt), params, speculation)


def drain(decoder: Decoder, most: int = 10_000) -> list[Event]:
    """All events until the decoder has nothing left to do."""
    events: list[Event] = []
    for _ in range(most):
        if not decoder.busy:
            return events
        events += decoder.step()
    raise AssertionError(f"still busy after {most} steps")


def text(events: list[Event], request: int) -> list[int]:
    """Tokens of one request."""
    return [token for event in events if event.request == request for token in event.output.tokens]


def toy_limits(**changes: int) -> Limits:
    values = {
        "max_requests": 8,
        "max_rows": 8 * 65,
        "prefill_chunk": 16,
        "max_context": 256,
        "page_size": 16,
        "kv_pages": 200,
        "draft_depth": 7,
        "tree_top_k": 8,
    }
    return Limits(**{**values, **changes})


def toy_plan(limits: Limits, vocab: int = VOCAB) -> Plan:
    """A plan without steps: the toy does the work of the phases itself."""
    requests = [size for size in (1, 2, 4, 8) if size < limits.max_requests] + [limits.max_requests]
    rows = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size < limits.max_rows] + [limits.max_rows]
    keys = [("prefill", limits.prefill_chunk), ("root", limits.max_requests)]
    keys += [("verify", size) for size in rows]
    if limits.draft_depth:
        keys += [("draft", size) for size in requests]
        sizes = {size * limits.path_length for size in requests} | {limits.prefill_chunk}
        keys += [("append", size) for size in sorted(sizes)]
    settings = {
        "limits": {name: getattr(limits, name) for name in Limits.__dataclass_fields__},
        "model": {"vocab_size": vocab, "eos_token_ids": [EOS]},
    }
    buffers = row_buffers(limits) | request_buffers(limits)
    buffers |= vocabulary_buffers(limits, vocab) | result_buffers(limits, vocab)
    phases = {phase.key: phase for phase in (Phase(name, bucket, ()) for name, bucket in keys)}
    return Plan(1, 0, "cpu", "float32", 0, buffers, {}, phases, settings)


class ToyExecutor:
    """`engine_runtime.executor.Executor` over `toy_plan`."""

    def __init__(self, limits: Limits, drafter: Drafter | None = None, vocab: int = VOCAB) -> None:
        self.plan = toy_plan(limits, vocab)
        self.limits = limits
        self.vocab = vocab
        self.drafter = good_drafter if drafter is None else drafter
        self.log: list[str] = []
        self.nan_token = -1  # a row that holds this token has NaN logits
        self.buffers = {
            name: torch.full(spec.shape, -1 if spec.dtype == "int32" else 0, dtype=torch.int64).to(
                TORCH_DTYPES[spec.dtype]
            )
            for name, spec in self.plan.buffers.items()
        }
        self.host = {name: tensor.numpy() for name, tensor in self.buffers.items()}
        shape = (1, limits.kv_slots, 2)
        self.kv = np.full(shape, np.nan, np.float32)  # [..., 0] token, [..., 1] position
        self.draft_kv = np.full(shape, np.nan, np.float32)
        self.taps = np.full(limits.pass_rows, -1, np.int64)
        tree = {"draft_depth": limits.draft_depth, "top_k": limits.tree_top_k}
        self._build = self._plugin("ddtree_build", {**tree, "page_size": limits.page_size, "tp_world": 1})
        self._accept = self._plugin("ddtree_accept", {"path_length": limits.path_length})
        self._compact = self._plugin("kv_compact", {})
        self._sample = self._plugin("sample", {})

    @staticmethod
    def _plugin(name: str, attrs: dict[str, Any]) -> Callable[[Sequence[Any]], Any]:
        plugin = get_plugin(name)
        runner = plugin.reference(attrs, SingleRank())

        def call(operands: Sequence[Any]) -> Any:
            assert len(operands) == len(plugin.inputs), name
            return runner(*operands)

        return call

    def read(self, name: str, at: int | slice = slice(None)) -> np.ndarray:
        return self.host[name][at]

    def write(self, name: str, values: Any, at: int | slice = slice(None)) -> None:
        self.host[name][at] = values

    def synchronize(self) -> None:
        pass

    def run(self, phase: str) -> None:
        self.log.append(phase)
        name, bucket = self.plan.phases[phase].name, self.plan.phases[phase].bucket
        getattr(self, f"_{name}")(bucket)

    # ---- phases ----

    def _prefill(self, rows: int) -> None:
        self._store(rows)
        host = self.host
        row, slot = int(host["last_row"][0]), int(host["last_request"][0])
        assert host["row_request"][row] == slot and host["request_rows"][slot] == row + 1
        assert host["context_len"][slot] == host["positions"][0], "rows see as much as context_len says"
        position = int(host["last_position"][0])
        tokens = self.context(slot, position + 1)
        host["logits"][0] = np.nan if tokens[-1] == self.nan_token else self.target_logits(tokens)
        last = [self.buffers["last_position"], self.buffers["last_request"]]
        self.buffers["sampled"][:1] = self._draw(self.buffers["logits"][:1], *last)

    def _append(self, rows: int) -> None:
        host = self.host
        for row, position, slot in zip(
            host["append_rows"][:rows].tolist(),
            host["append_positions"][:rows].tolist(),
            host["append_slots"][:rows].tolist(),
            strict=True,
        ):
            if row >= 0:
                assert slot >= self.limits.page_size
                self.draft_kv[0, slot] = self.taps[row], position

    def _root(self, bucket: int) -> None:
        self._run_build(None, self.limits.max_requests)

    def _draft(self, blocks: int) -> None:
        depth, top_k = self.limits.draft_depth, self.limits.tree_top_k
        candidates = np.zeros((blocks, depth, 2 * top_k + 1), np.float32)
        for block, slot in enumerate(self.host["draft_requests"][:blocks].tolist()):
            if slot < 0:
                continue
            length = int(self.host["context_len"][slot])
            context = self.context(slot, length)
            start = int(self.host["draft_start"][slot])
            drafted = self.draft_kv[0, self.slots(slot, np.arange(start, length))]
            assert np.array_equal(drafted, np.stack([context[start:], np.arange(start, length)], 1)), "draft context"
            tokens = [*context, int(self.host["anchor"][slot])]
            logits, ids, total = self.drafter(self, slot, tokens)
            candidates[block, :, :top_k] = logits
            candidates[block, :, top_k:-1] = ids.astype(np.int32).view(np.float32)
            candidates[block, :, -1] = total
        self._run_build(torch.from_numpy(candidates.reshape(blocks * depth, -1)), blocks)

    def _run_build(self, candidates: torch.Tensor | None, blocks: int) -> None:
        names = get_plugin("ddtree_build").inputs[2:]
        self._build([candidates, self.buffers["draft_requests"][:blocks], *(self.buffers[n] for n in names)])

    def _verify(self, rows: int) -> None:
        self._store(rows)
        host = self.host
        logits = np.zeros((rows, self.vocab), np.float32)
        bits = np.unpackbits(host["mask"].view(np.uint8), axis=1, bitorder="little")
        covered = 0
        for slot in np.flatnonzero(host["request_rows"]).tolist():
            first, count = int(host["first_row"][slot]), int(host["request_rows"][slot])
            covered += count
            mine = slice(first, first + count)
            assert (host["row_request"][mine] == slot).all()
            length = int(host["context_len"][slot])
            assert np.array_equal(host["row_slot"][mine], self.slots(slot, length + np.arange(count)))
            context = np.asarray(self.context(slot, length))
            base = mix(context, np.arange(length)).sum(dtype=np.uint32)
            own = mix(host["tokens"][mine], host["positions"][mine])
            seen = bits[mine, :count].astype(np.uint32)
            with np.errstate(over="ignore"):
                logits[mine] = logits_of(base + (seen * own[None, :]).sum(1, dtype=np.uint32), self.vocab)
            logits[mine][host["tokens"][mine] == self.nan_token] = np.nan
        assert covered == int(host["num_rows"][0]) <= rows
        host["logits"][:rows] = logits
        buffers = self.buffers
        operands = [buffers[name][:rows] for name in ("logits", "positions", "row_request")]
        buffers["sampled"][:rows] = self._draw(*operands, buffers["tokens"][:rows], buffers["row_parent"][:rows])
        self._accept([buffers["sampled"][:rows], *(buffers[n] for n in get_plugin("ddtree_accept").inputs[1:])])
        pool = torch.from_numpy(self.kv)
        self._compact([*(buffers[n] for n in get_plugin("kv_compact").inputs[:-1]), pool])

    def _draw(self, logits: torch.Tensor, positions: torch.Tensor, requests: torch.Tensor, *rows: torch.Tensor) -> Any:
        """`sample` of these rows; `rows`: their tokens and parents, where they have ancestors in this pass."""
        per_request = [self.buffers[name] for name in get_plugin("sample").inputs[3:-2]]
        return self._sample([logits, positions, requests, *per_request, *(rows or (None, None))])

    # ---- the toy model ----

    def _store(self, rows: int) -> None:
        """Every row writes its KV, padding rows to slot 0, and its tap."""
        host = self.host
        used = host["row_request"][:rows] >= 0
        slots = host["row_slot"][:rows]
        assert (slots[~used] == 0).all() and (slots[used] >= self.limits.page_size).all()
        assert len(set(slots[used].tolist())) == used.sum(), "two rows share a KV slot"
        self.kv[0, slots, 0] = host["tokens"][:rows]
        self.kv[0, slots, 1] = host["positions"][:rows]
        self.taps[:rows] = np.where(used, host["tokens"][:rows], -1)

    def slots(self, slot: int, positions: np.ndarray) -> np.ndarray:
        size = self.limits.page_size
        return self.host["block_table"][slot, positions // size] * size + positions % size

    def context(self, slot: int, length: int) -> list[int]:
        """The `length` committed tokens of request slot `slot`, as its KV cache holds them."""
        entries = self.kv[0, self.slots(slot, np.arange(length))]
        assert np.array_equal(entries[:, 1], np.arange(length)), "committed KV is not in order"
        return entries[:, 0].astype(np.int64).tolist()

    def target_logits(self, tokens: Sequence[int]) -> np.ndarray:
        """float32 [vocab] after `tokens`."""
        positions = np.arange(len(tokens))
        return logits_of(mix(np.asarray(tokens), positions).sum(dtype=np.uint32)[None], self.vocab)[0]

    def true_token(self, slot: int, tokens: Sequence[int]) -> int:
        """What the target draws after `tokens`, noise included, rules and penalties roughly."""
        logits = torch.from_numpy(self.target_logits(tokens))[None]
        last = [torch.tensor([len(tokens) - 1], dtype=torch.int32), torch.tensor([slot], dtype=torch.int32)]
        return int(self._draw(logits, *last)[0])


# ---- drafters ----


def _ranked(scores: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Candidates of scores [D, V] as `draft_topk` orders them: descending, ties by lowest id."""
    ids = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
    total = np.log(np.exp(scores.astype(np.float64)).sum(1))
    return np.take_along_axis(scores, ids, 1), ids, total


def _scores(toy: ToyExecutor, slot: int, tokens: Sequence[int], choose: Callable[[list[int]], int]) -> np.ndarray:
    """[D, V] scores whose best token at each depth is `choose(tokens so far)`, followed as a chain."""
    chain = list(tokens)
    scores = np.zeros((toy.limits.draft_depth, toy.vocab), np.float32)
    for depth in range(toy.limits.draft_depth):
        token = choose(chain)
        scores[depth] = toy.target_logits(chain)
        scores[depth, token] = scores[depth].max() + 1
        chain.append(token)
    return scores


def good_drafter(toy: ToyExecutor, slot: int, tokens: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The target's own logits along their argmax chain, with noise: right often, not always."""
    scores = _scores(toy, slot, tokens, lambda chain: int(toy.target_logits(chain).argmax()))
    noise = hash32(np.arange(scores.size, dtype=np.uint32), len(tokens) * 7919 + tokens[-1])
    scores += 3 * noise.reshape(scores.shape).astype(np.float32) / np.float32(2**32)
    return _ranked(scores, toy.limits.tree_top_k)


def right_drafter(toy: ToyExecutor, slot: int, tokens: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First choice: exactly what the target will draw."""
    return _ranked(_scores(toy, slot, tokens, lambda chain: toy.true_token(slot, chain)), toy.limits.tree_top_k)


def wrong_drafter(toy: ToyExecutor, slot: int, tokens: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The token that the target will draw is not among the first depth's candidates."""
    scores = _scores(toy, slot, tokens, lambda chain: int(toy.target_logits(chain).argmax()))
    scores[0, toy.true_token(slot, tokens)] = -1000
    return _ranked(scores, toy.limits.tree_top_k)


def random_drafter(toy: ToyExecutor, slot: int, tokens: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    noise = hash32(np.arange(toy.limits.draft_depth * toy.vocab, dtype=np.uint32), len(tokens) * 31 + tokens[-1])
    scores = noise.astype(np.float32).reshape(toy.limits.draft_depth, toy.vocab) / np.float32(2**30)
    return _ranked(scores, toy.limits.tree_top_k)


def eos_drafter(toy: ToyExecutor, slot: int, tokens: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Always the end of the text."""
    scores = _scores(toy, slot, tokens, lambda chain: EOS)
    return _ranked(scores, toy.limits.tree_top_k)


def repeat_drafter(toy: ToyExecutor, slot: int, tokens: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same candidates, all equally likely, at every depth: the last token first."""
    scores = np.zeros((toy.limits.draft_depth, toy.vocab), np.float32)
    scores[:, tokens[-1]] = 1e-3
    return _ranked(scores, toy.limits.tree_top_k)


def sparse_drafter(toy: ToyExecutor, slot: int, tokens: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Only two candidates at each depth have a finite logit (a masked or pruned vocabulary)."""
    logits, ids, _ = good_drafter(toy, slot, tokens)
    logits[:, 2:] = -np.inf
    return logits, ids, np.log(np.exp(logits[:, :2].astype(np.float64)).sum(1))
