"""Eigenvectors of small symmetric matrices in a fixed number of steps, for which nothing waits."""

# torch.linalg has no types.
# pyright: basic

import torch
from jaxtyping import Float64
from torch import Tensor
from torch.nn import functional

STEPS = 16
_NOTHING = 1e-15  # of the trace: entries this small are rounding, and would turn equal eigenvalues about for ever


def jacobi_eigenvectors(symmetric: Float64[Tensor, "B Q Q"]) -> Float64[Tensor, "B Q Q"]:
    """Orthonormal eigenvectors in columns, the smallest eigenvalue's first.

    Each step turns every pair of columns at once by Jacobi's angle for that pair alone and makes the result orthonormal
    again. Near the end a step squares the error; how many come before depends on the matrix, so this is for columns
    that are near to eigenvectors already, or almost sorted, as those of a subspace iteration are. `STEPS` leave nothing
    but rounding there up to some 200 columns; where that is not enough, columns stay orthonormal but mixed.

    Args:
        symmetric: Without negative eigenvalues; all of zeros is fine.
    """
    identity = torch.eye(symmetric.shape[-1], dtype=symmetric.dtype, device=symmetric.device)
    # Added to gaps: infinity to those of an entry to itself, a sign to those of nothing.
    even = torch.full_like(identity, 1e-300).tril_(-1)
    even = (even.mT - even).fill_diagonal_(torch.inf)
    trace = symmetric.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
    rest = symmetric / trace.clamp_(min=torch.finfo(torch.float64).tiny)
    vectors = identity.expand_as(symmetric)
    for _ in range(STEPS):
        values = rest.diagonal(dim1=-2, dim2=-1)
        half_gap = torch.add(even, values[:, None, :] - values[:, :, None], alpha=0.5)
        turned = torch.add(identity, functional.hardshrink(rest, _NOTHING).div_(half_gap).atan_(), alpha=0.5)
        lower = torch.linalg.cholesky_ex(turned.mT @ turned).L
        back = torch.linalg.solve_triangular(lower, turned.mT, upper=False)
        rest, vectors = back @ rest @ back.mT, vectors @ back.mT
    order = rest.diagonal(dim1=-2, dim2=-1).sort(dim=-1, stable=True).indices
    return vectors.gather(-1, order[:, None, :].expand_as(vectors))
