"""torch's names for the dtypes of a plan; for the builder and the CPU executor, the only users of torch."""

import torch

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int32": torch.int32,
    "uint32": torch.uint32,
    "int64": torch.int64,
    "uint8": torch.uint8,
}
