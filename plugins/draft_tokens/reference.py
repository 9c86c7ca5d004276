"""Reference of `draft_tokens`."""

import torch


def draft_tokens(requests: torch.Tensor, anchor: torch.Tensor, block_size: int, mask_token_id: int) -> torch.Tensor:
    """Block input ids i32 [B * block_size] (DFlash, section 2.1 of arXiv 2602.06036): the anchor, then masks.

    requests i32 [B]: request slot of each block, -1 for padding (masks only). anchor i32 [R].
    """
    ids = torch.full((requests.shape[0], block_size), mask_token_id, dtype=torch.int32)
    used = requests >= 0
    ids[used, 0] = anchor[requests[used].long()]
    return ids.reshape(-1)
