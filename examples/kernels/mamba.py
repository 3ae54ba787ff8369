"""Stand-ins for Mamba's compiled kernels: vramfit run --gpu "RTX 4090" --kernels examples/kernels/mamba.py train.py

What each allocates is read from its C++: csrc/selective_scan/selective_scan.cpp of mamba-ssm 2.3, selective_scan_fwd
and selective_scan_bwd. mamba-ssm itself must be importable; without a CUDA compiler its folder on PYTHONPATH is enough.
Mamba's Triton kernels need no stand-in.
"""

import torch

import vramfit

CHUNK = 2048  # elements of the sequence for which a state is kept


@vramfit.fake_kernel("selective_scan_cuda.fwd")
def selective_scan_fwd(u, delta, A, B, C, D, z, delta_bias, delta_softplus):
    gated = [] if z is None else [torch.empty_like(z)]
    out = torch.empty_like(delta)
    batch, channels, length = u.shape
    chunks = -(-length // CHUNK)
    states = torch.empty(batch, channels, chunks, A.shape[1] * 2, dtype=A.dtype, device=u.device)
    return [out, states, *gated]


@vramfit.fake_kernel("selective_scan_cuda.bwd")
def selective_scan_bwd(
    u, delta, A, B, C, D, z, delta_bias, dout, x, out, dz, delta_softplus, recompute_out_z
):
    gated = []
    if z is not None:
        gated.append(torch.empty_like(z) if dz is None else dz)
        if recompute_out_z:
            gated.append(torch.empty_like(out))
    du, ddelta, dA = torch.empty_like(u), torch.empty_like(delta), torch.zeros_like(A)
    # Where B and C differ by position, their gradients are summed in float32 (and cast after the kernel).
    wide_B, wide_C = (
        torch.zeros_like(t, dtype=torch.float32) if t.dim() >= 3 else torch.zeros_like(t) for t in (B, C)
    )
    dD, dbias = (
        torch.empty(0, device=u.device) if t is None else torch.zeros_like(t) for t in (D, delta_bias)
    )
    return [du, ddelta, dA, wide_B.to(B.dtype), wide_C.to(C.dtype), dD, dbias, *gated]
