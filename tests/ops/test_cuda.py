"""The operators on a GPU: the CPU's results, and not one wait for the device on the way."""

import pytest
import torch
from torch import Tensor

from diffprune.fast.graphs import waiting_refused
from diffprune.ops import RESPONSES, gumbel_topk, hard_mask, hard_topk, soft_topk, vp_noise

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def make_inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(6, 300, generator=generator)
    mask = torch.arange(300) < torch.tensor([[300], [1], [17], [250], [300], [0]])
    return logits, mask, torch.tensor([30, 1, 4, 249, 0, 0])


@pytest.mark.parametrize("response", RESPONSES)
@pytest.mark.parametrize("tau", [0.01, 1.0])
def test_soft_topk_gives_what_it_gives_on_the_cpu(response, tau):
    logits, mask, k = make_inputs()
    results = []
    for device in ("cpu", "cuda"):
        moved = logits.to(device).requires_grad_()
        weights, z = soft_topk(moved, k.to(device), tau=tau, mask=mask.to(device), response=response, return_z=True)
        (grad,) = torch.autograd.grad((weights * torch.arange(300, device=device)).sum(), moved)
        results.append([tensor.detach().cpu() for tensor in (weights, z, grad)])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_hard_topk_gives_what_it_gives_on_the_cpu():
    logits, mask, k = make_inputs()
    for values in (logits, logits.round()):  # with ties, too
        expected = hard_topk(values, k, mask)
        assert torch.equal(hard_topk(values.cuda(), k.cuda(), mask.cuda()).cpu(), expected)


def test_nothing_waits_for_the_device():
    logits, mask, k = (tensor.cuda() for tensor in make_inputs())
    logits.requires_grad_()
    x = torch.randn(6, 300, 8, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    with waiting_refused():
        for response in RESPONSES:
            weights, z = soft_topk(logits, k, tau=0.5, mask=mask, response=response, return_z=True)
            out = vp_noise(x, z, response=response, generator=generator)
            torch.autograd.grad(out.sum() + weights.square().sum(), logits)
        gumbel_topk(logits, k, tau=0.5, mask=mask, generator=generator)
        hard_mask(logits, k, mask)
        hard_topk(logits, 3)
