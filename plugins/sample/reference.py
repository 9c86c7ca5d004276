"""Reference of `sample`: processed logits plus Gumbel noise keyed by (seed, position, token)."""

from __future__ import annotations

import torch

from plugins.core.state import PROMPT_TOKEN, SAMPLED_DEAD_END, SAMPLED_NAN

_MASK64 = (1 << 64) - 1
_GOLDEN, _MUL1, _MUL2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(value: int) -> int:
    """The int64 with the same bits as the low 64 bits of `value`."""
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


def _mix(x: int) -> int:
    """SplitMix64's finaliser on uint64 (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> 30)) * _MUL1 & _MASK64
    x = (x ^ (x >> 27)) * _MUL2 & _MASK64
    return x ^ (x >> 31)


def gumbel(seed: int, position: int, tokens: torch.Tensor) -> torch.Tensor:
    """Gumbel(0, 1) noise float32 of `tokens` int64 [N] at an absolute `position`; the same on every device.

    In uint64 arithmetic, with mix = SplitMix64's finaliser and G = 0x9E3779B97F4A7C15:
        key = mix(seed + G * (position + 1));  bits = mix(key + G * (token + 1));  u = ((bits >> 41) + 0.5) *
        2^-23
    and noise = -log(-log(u)) in float32. u has 24 significant bits, so it is exact in float32 and never 0 or
    1.
    """
    key = _mix((seed + _GOLDEN * (position + 1)) & _MASK64)
    # int64 wraps around; a logical shift right is an arithmetic one with the copied sign bits cleared
    x = (tokens + 1) * _signed(_GOLDEN) + _signed(key)
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * _signed(_MUL1)
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * _signed(_MUL2)
    bits = (x ^ (x >> 31 & (1 << 33) - 1)) >> 41 & (1 << 23) - 1
    u = (bits.to(torch.float32) + 0.5) * 2.0**-23
    return -torch.log(-torch.log(u))


def kept_tokens(scores: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Ids int64, ascending, of the tokens that may be drawn from scores float32 [V] (largest 0).

    top_k (0: off) keeps the k largest; top_p (1: off) of these the smallest set of most probable ones whose
    mass reaches top_p; min_p (0: off) of these the ones with at least min_p times the largest probability.
    Ties go to the lowest ids; the most probable token always stays.
    """
    kept = torch.arange(len(scores))
    if 0 < top_k < len(kept):
        kept = torch.nonzero(scores >= torch.topk(scores, top_k).values[-1])[:, 0]
        kept = _descending(scores, kept)[:top_k].sort().values  # ties at the k-th value
    if top_p < 1.0:
        chances = torch.softmax(scores[kept], dim=0)
        # those below (1 - top_p) / count together hold less than 1 - top_p, so none of them is needed
        likely = _descending(chances, torch.nonzero(chances >= (1.0 - top_p) / len(kept))[:, 0])
        mass = chances[likely].double().cumsum(0)
        kept = kept[likely[: int((mass < top_p).sum()) + 1].sort().values]
    if min_p > 0.0:
        kept = kept[scores[kept].exp() >= min(min_p, 1.0)]
    return kept


def _descending(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """`ids` (ascending) by descending score, ties by lowest id."""
    return ids[torch.argsort(scores[ids], descending=True, stable=True)]


def allowed_tokens(mask: torch.Tensor, size: int) -> torch.Tensor:
    """bool [size] of mask uint32 [words]: bit t % 32 of word t // 32 for token t."""
    bits = mask.view(torch.int32)[:, None] >> torch.arange(32) & 1
    return bits.reshape(-1)[:size].bool()


def penalize(
    scores: torch.Tensor, counts: torch.Tensor, bias: torch.Tensor, presence: float, frequency: float, repetition: float
) -> torch.Tensor:
    """scores float32 [V] with bias float32 [V] added, then penalties for counts int32 [V] (PROMPT_TOKEN included).

    The score of a token that was seen, in the prompt or since, is divided by `repetition` where it is positive, else
    multiplied; then frequency * count and, for a count above 0, presence are taken off. The prompt does not count.
    """
    generated = counts & (PROMPT_TOKEN - 1)
    scores = scores + bias
    scores = torch.where(counts > 0, torch.where(scores > 0, scores / repetition, scores * repetition), scores)
    scores = scores - frequency * generated
    return scores - presence * (generated > 0)


def sample(
    logits: torch.Tensor,
    positions: torch.Tensor,
    row_request: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    penalized: torch.Tensor,
    presence_penalty: torch.Tensor,
    frequency_penalty: torch.Tensor,
    repetition_penalty: torch.Tensor,
    token_counts: torch.Tensor,
    logit_bias: torch.Tensor,
    row_masked: torch.Tensor,
    vocab_mask: torch.Tensor,
    tokens: torch.Tensor | None,
    row_parent: torch.Tensor | None,
) -> torch.Tensor:
    """Token int32 [T] that follows each row of logits float32 [T, V]; 0 for padding. Operands as in `Sample`.

    Scores are the logits, -inf where the mask of a masked row allows nothing; in a penalized request with bias and
    penalties (`penalize`), the counts being token_counts and, given `row_parent`, the tokens of the row and its
    ancestors. Temperature 0: the argmax, lowest id first. Else the argmax of (score - largest) / temperature +
    gumbel(seed, positions + 1, token) over `kept_tokens`: a draw from their softmax (Gumbel 1954) that depends on
    prefix and noise alone. SAMPLED_NAN where the logits are no distribution: a NaN, +inf, or nothing above -inf;
    SAMPLED_DEAD_END where they are, but the mask leaves nothing above -inf.
    """
    rows = logits.shape[0]
    requests = row_request[:rows]
    slots = requests.clamp(min=0).long()
    largest, token = logits.max(dim=1)  # propagates NaN; the first of equals
    token = torch.where(largest.isfinite(), token, SAMPLED_NAN)
    valid = (requests >= 0) & (token >= 0)
    masked, changed = row_masked[:rows] != 0, penalized[slots] != 0
    scores_of = {}
    for row in (valid & (masked | changed)).nonzero()[:, 0].tolist():
        slot, scores = int(slots[row]), logits[row]
        if masked[row]:
            scores = torch.where(allowed_tokens(vocab_mask[row], logits.shape[1]), scores, -torch.inf)
        if changed[row]:
            counts = token_counts[slot].clone()
            if tokens is not None and row_parent is not None:
                ancestor = row
                while ancestor >= 0:
                    counts[int(tokens[ancestor])] += 1
                    ancestor = int(row_parent[ancestor])
            factors = (presence_penalty, frequency_penalty, repetition_penalty)
            scores = penalize(scores, counts, logit_bias[slot], *(float(factor[slot]) for factor in factors))
        scores_of[row] = scores
        largest[row], token[row] = scores.max(dim=0)
        if not largest[row].isfinite():
            token[row] = SAMPLED_DEAD_END if largest[row] == -torch.inf else SAMPLED_NAN
    drawn = valid & (temperature[slots] > 0) & (token >= 0)
    for row in drawn.nonzero()[:, 0].tolist():
        slot = int(slots[row])
        scores = (scores_of.get(row, logits[row]) - largest[row]) / temperature[slot]
        kept = kept_tokens(scores, int(top_k[slot]), float(top_p[slot]), float(min_p[slot]))
        noise = gumbel(int(seed[slot]), int(positions[row]) + 1, kept)
        token[row] = kept[torch.argmax(scores[kept] + noise)]
    return torch.where(requests >= 0, token, 0).to(torch.int32)
