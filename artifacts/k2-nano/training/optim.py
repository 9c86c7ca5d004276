"""Muon for the matrices, AdamW for the rest."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn


def orthogonalise(g: Tensor) -> Tensor:
    """Newton-Schulz iteration (5 steps, bfloat16): g [n, r, c] with r <= c -> nearly orthogonal rows, same shape."""
    x = g.bfloat16()
    x = x / (x.flatten(1).norm(dim=1).view(-1, 1, 1) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay; update scaled to AdamW's size, 0.2 * sqrt(max(r, c)).

    Parameters [r, c] or stacks [n, r, c] of equal matrix shape are processed in one batch.
    """

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            buckets: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
            for p in group["params"]:
                buckets[(p.shape[-2], p.shape[-1])].append(p)
            for (rows, cols), params in buckets.items():
                grads = torch.cat([p.grad.reshape(-1, rows, cols) for p in params])
                state = self.state[params[0]]
                buffer = state.setdefault("momentum", torch.zeros_like(grads))
                buffer.lerp_(grads, 1 - group["momentum"])
                update = grads.lerp(buffer, group["momentum"])
                update = orthogonalise(update.mT).mT if rows > cols else orthogonalise(update)
                size = 0.2 * max(rows, cols) ** 0.5 * group["lr"]
                parts = update.float().split([p.numel() // (rows * cols) for p in params])
                for p, part in zip(params, parts, strict=True):
                    p.mul_(1 - group["lr"] * group["decay"]).add_(part.reshape(p.shape), alpha=-size)


def make_optimizers(model: nn.Module, muon_lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    """Muon on the inner matrices; AdamW without decay on embedding, head, router and norms."""
    matrices, others = [], []
    for name, p in model.named_parameters():
        outer = p.ndim < 2 or "embed_tokens" in name or "lm_head" in name or "mlp.gate.weight" in name
        (others if outer else matrices).append(p)
    adam = torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    return [Muon(matrices, muon_lr), adam]


def learning_rate(progress: float) -> float:
    """Share of the peak rate at progress 0..1: short warm-up, flat to 0.3, then linear down to 1 %."""
    return min(progress / 0.01, 1.0, max(0.01, (1 - progress) / 0.7))
