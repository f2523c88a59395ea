# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-2 through PyTorch, as a peer of `tessera bench --device cuda`."""

import torch_cuda

if __name__ == "__main__":
    torch_cuda.serve(torch_cuda.FLASH)
