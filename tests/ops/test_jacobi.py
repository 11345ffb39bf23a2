"""Eigenvectors without a look at the device: as good as the library's, whatever the spectrum."""

import pytest
import torch

from diffprune.ops.jacobi import jacobi_eigenvectors


def sorted_by_iteration(spectrum: torch.Tensor, seed: int) -> torch.Tensor:
    """A matrix of that spectrum in a basis that a few rounds of subspace iteration have come to."""
    generator = torch.Generator().manual_seed(seed)
    size = len(spectrum)
    vectors = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
    matrix = (vectors * spectrum) @ vectors.T
    basis = torch.randn(size, size, generator=generator, dtype=torch.float64)
    for _ in range(9):
        basis = torch.linalg.qr(matrix @ basis).Q
    rotated = basis.T @ matrix @ basis
    return (rotated + rotated.T)[None] / 2


SPECTRA = {
    "even": torch.linspace(1.0, 2.0, 32),
    "steep": torch.arange(1, 41) ** -3.0,
    "near pairs": torch.tensor([1.0, 1 + 1e-6, 2, 2 + 1e-4, 3, 3 + 1e-5, 5, 5.01]),
    "one": torch.tensor([3.0]),
}


@pytest.mark.parametrize("spectrum", [pytest.param(value, id=name) for name, value in SPECTRA.items()])
def test_columns_are_the_library_s_eigenvectors(spectrum: torch.Tensor) -> None:
    matrix = torch.cat([sorted_by_iteration(spectrum.double(), seed) for seed in range(3)])
    vectors = jacobi_eigenvectors(matrix)
    expected = torch.linalg.eigh(matrix).eigenvectors
    torch.testing.assert_close(vectors.abs(), expected.abs(), rtol=0, atol=1e-7)


@pytest.mark.parametrize("rank", [0, 1, 5])
def test_equal_eigenvalues_leave_orthonormal_columns_that_split_the_matrix(rank: int) -> None:
    spectrum = torch.zeros(12, dtype=torch.float64)
    spectrum[:rank] = torch.tensor([4.0, 4.0, 1.0, 1.0, 1.0])[:rank]
    matrix = sorted_by_iteration(spectrum, 0)
    vectors = jacobi_eigenvectors(matrix)
    identity = torch.eye(12, dtype=torch.float64)[None]
    torch.testing.assert_close(vectors.mT @ vectors, identity)
    torch.testing.assert_close(vectors.mT @ matrix @ vectors, torch.diag(spectrum.sort().values)[None])
