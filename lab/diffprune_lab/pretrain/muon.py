"""Muon: momentum whose matrix updates are made orthogonal, with AdamW for everything that is not a hidden matrix.

K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024. Every direction of a weight matrix
then moves equally far in a step, which learns from fewer samples than AdamW and keeps the scale of the features bounded
(with AdamW it once grew until nothing was learned). Matrices of one shape are stacked and treated in one batch: a small
model has many small matrices, and one by one they would cost more launches than the backward pass.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor, nn


def orthogonalise(matrices: Float[Tensor, "M R C"], steps: int = 5) -> Float[Tensor, "M R C"]:
    """Each matrix with all its singular values brought near 1, by a quintic Newton-Schulz iteration.

    The coefficients trade exactness for speed: singular values end between about 0.7 and 1.2, which is as good here.
    """
    flat = matrices.shape[1] > matrices.shape[2]
    work = matrices.transpose(1, 2) if flat else matrices
    work = work.to(torch.bfloat16) if work.is_cuda else work.float()
    work = work / (work.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = work @ work.transpose(1, 2)
        work = 3.4445 * work + (-4.7750 * gram + 2.0315 * gram @ gram) @ work
    return (work.transpose(1, 2) if flat else work).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Muon for 2-D parameters: in a step each entry changes by 0.2 of the learning rate (root mean square), which is
    about what AdamW does."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                gradients = torch.stack([parameter.grad for parameter in parameters if parameter.grad is not None])
                state = self.state[parameters[0]]  # matrices of one shape share an average
                average = state.setdefault("average", torch.zeros_like(gradients))
                average.lerp_(gradients, 1 - group["momentum"])
                ahead = gradients.lerp_(average, group["momentum"])  # Nesterov
                updates = orthogonalise(ahead) * (0.2 * max(shape) ** 0.5 * group["lr"])
                for parameter, update in zip(parameters, updates.unbind(), strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update)
