import math
from collections.abc import Iterator

import jaxtyping
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from diffprune.ops import RESPONSES, hard_topk, soft_topk, sqrt_weight, vp_noise
from tests.searching import examples

# Equal logits may get weights this many roundings apart: vectorised and scalar kernels differ in the last bit.
LAST_BIT = 2

both_responses = pytest.mark.parametrize("response", RESPONSES)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """The functions as a user has them, without the shape checks of the test run."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def make_logits(seed: int, shape: tuple[int, int], kind: str, scale: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "normal":
        return scale * torch.randn(shape, generator=generator)
    if kind == "ties":
        return scale * torch.randint(-2, 3, shape, generator=generator).float()
    return scale * (1 + 1e-3 * torch.randn(shape, generator=generator))  # "far": large, with small differences


def make_mask(seed: int, shape: tuple[int, int]) -> Tensor:
    """Ragged rows: the real tokens come first, at least three of them."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(3, shape[1] + 1, (shape[0], 1), generator=generator)
    return torch.arange(shape[1]) < counts


@given(
    seed=st.integers(0, 10_000),
    num_tokens=st.integers(3, 150),
    kind=st.sampled_from(["normal", "ties", "far"]),
    scale=st.sampled_from([1e-3, 1.0, 50.0, 1e4]),
    tau=st.sampled_from([0.01, 0.1, 1.0, 10.0]),
    share=st.floats(0, 1),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    response=st.sampled_from(RESPONSES),
    is_whole=st.booleans(),
)
@examples(150)
def test_weights_sum_to_k_and_keep_the_order(seed, num_tokens, kind, scale, tau, share, dtype, response, is_whole):
    logits = make_logits(seed, (3, num_tokens), kind, scale).to(dtype)
    mask = make_mask(seed, (3, num_tokens))
    k = 1 + share * (mask.sum(-1) - 2)  # 1 to N - 1
    k = k.long() if is_whole else k
    weights, z = soft_topk(logits, k, tau=tau, mask=mask, response=response, return_z=True)

    assert weights.dtype == z.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert ((weights.double().sum(-1) - k).abs() <= 1e-5 * k).all()
    assert weights.min() >= 0 and weights.max() <= 1
    assert (weights[~mask] == 0).all() and (z[~mask] == -math.inf).all()
    for row_weights, row_logits, row_mask in zip(weights, logits, mask, strict=True):
        ordered = row_weights[row_mask][row_logits[row_mask].argsort()]
        assert (ordered.diff() >= -LAST_BIT * torch.finfo(ordered.dtype).eps * ordered[1:]).all()


@pytest.mark.parametrize("k", [1, 111_111, 999_999])
def test_a_million_tokens_still_sum_to_k(k):
    logits = make_logits(0, (1, 1_000_000), "normal", 1e4)
    weights = soft_topk(logits, k, tau=0.01)
    assert abs(weights.double().sum().item() - k) <= 1e-5 * k
    assert abs(weights.sum().item() - k) <= 1e-5 * k


@both_responses
@pytest.mark.parametrize("tau", [0.1, 10.0])
def test_many_tokens_still_sum_to_k(response, tau):
    logits = make_logits(0, (1, 100_000), "far", 1e4)
    for k in (1, 3000, 99_999):
        weights = soft_topk(logits, k, tau=tau, response=response)
        assert abs(weights.double().sum().item() - k) <= 1e-5 * k


@both_responses
def test_a_common_shift_changes_nothing(response):
    logits = make_logits(1, (2, 40), "normal", 3.0).double()
    weights, z = soft_topk(logits, 7, tau=0.05, response=response, return_z=True)
    moved, moved_z = soft_topk(logits + 4096.0, 7, tau=0.05, response=response, return_z=True)
    torch.testing.assert_close(moved, weights, rtol=0, atol=1e-9)
    torch.testing.assert_close(moved_z, z, rtol=0, atol=1e-9)


@both_responses
def test_float32_logits_far_from_zero_lose_nothing(response):
    """Dividing by tau before the shift would miss the sum by almost 1e-3 here."""
    logits = 1e4 + torch.randn(4, 200, generator=torch.Generator().manual_seed(0))
    weights = soft_topk(logits, 20, tau=0.01, response=response)
    exact = soft_topk(logits.double() - 1e4, 20, tau=0.01, response=response)
    torch.testing.assert_close(weights.double(), exact, rtol=0, atol=1e-6)


@given(seed=st.integers(0, 10_000), num_tokens=st.integers(2, 60), response=st.sampled_from(RESPONSES))
@examples(40)
def test_a_low_temperature_gives_hard_topk(seed, num_tokens, response):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randperm(num_tokens, generator=generator)[None].float()
    k = int(torch.randint(1, num_tokens, (), generator=generator))
    weights = soft_topk(logits, k, tau=0.01, response=response)
    hard = torch.zeros_like(weights).scatter(-1, hard_topk(logits, k), 1.0)
    torch.testing.assert_close(weights, hard, rtol=0, atol=1e-6)


@both_responses
def test_in_a_wide_gap_the_threshold_lies_in_the_middle(response):
    """All weights round to 0 and 1 there, and the plain square root of the closed form underflows."""
    _, z = soft_topk(torch.tensor([[0.0, 1e4]]), 1, tau=0.01, response=response, return_z=True)
    torch.testing.assert_close(z, torch.tensor([[-5e5, 5e5]]))


@both_responses
def test_a_fraction_in_wide_gaps_goes_to_one_token(response):
    weights = soft_topk(torch.tensor([[-9e3, 0.0, 9e3, 8e3]]), torch.tensor([2.25]), tau=0.01, response=response)
    torch.testing.assert_close(weights, torch.tensor([[0.0, 0.25, 1.0, 1.0]]))


@both_responses
def test_equal_logits_share_the_budget(response):
    weights, z = soft_topk(torch.full((1, 8), 3.0), 4, tau=0.1, response=response, return_z=True)
    torch.testing.assert_close(weights, torch.full((1, 8), 0.5))
    torch.testing.assert_close(z, torch.zeros(1, 8))


@both_responses
def test_equal_logits_get_equal_weights_up_to_the_last_bit(response):
    """Rows as long as no vector register divides: their last tokens go through the scalar kernel."""
    for num_tokens in range(5, 80):
        logits = make_logits(num_tokens, (4, num_tokens), "ties", 0.7).double()
        weights = soft_topk(logits, num_tokens // 3, tau=0.3, response=response)
        for row, values in zip(weights, logits, strict=True):
            for value in values.unique():
                same = row[values == value]
                assert same.max() - same.min() <= LAST_BIT * torch.finfo(torch.float64).eps * same.max()


@both_responses
@pytest.mark.parametrize("is_ragged", [False, True])
def test_gradients_are_those_of_the_function(response, is_ragged):
    logits = make_logits(2, (3, 7), "normal", 1.0).double().requires_grad_()
    mask = torch.arange(7) < torch.tensor([[7], [4], [5]]) if is_ragged else None
    k = torch.tensor([2.0, 1.5, 3.2], dtype=torch.float64, requires_grad=True)
    tau = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    one_tau = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)

    def weigh(logits: Tensor, k: Tensor, tau: Tensor) -> Tensor:
        return soft_topk(logits, k, tau=tau, mask=mask, response=response)

    def threshold(logits: Tensor, tau: Tensor) -> Tensor:
        _, z = soft_topk(logits, k.detach(), tau=tau, mask=mask, response=response, return_z=True)
        return z if mask is None else z[mask]

    assert torch.autograd.gradcheck(weigh, (logits, k, tau))
    assert torch.autograd.gradcheck(weigh, (logits, k, one_tau))
    assert torch.autograd.gradcheck(threshold, (logits, tau))


@both_responses
def test_gradients_through_weights_and_z_add_up(response):
    logits = make_logits(3, (2, 6), "normal", 1.0).double().requires_grad_()

    def both(logits: Tensor) -> Tensor:
        weights, z = soft_topk(logits, 2, tau=0.5, response=response, return_z=True)
        return weights * z.sin()

    assert torch.autograd.gradcheck(both, (logits,))


def test_only_relative_logits_get_a_gradient():
    logits = make_logits(4, (2, 30), "normal", 1.0).double().requires_grad_()
    weights = soft_topk(logits, 5, tau=0.3)
    (grad,) = torch.autograd.grad((weights * torch.arange(30)).sum(), logits)
    assert grad.abs().max() > 1e-2
    assert grad.sum(-1).abs().max() < 1e-12


def test_equal_logits_still_get_a_gradient():
    """A scorer starts with equal logits: z is exactly 0 then, where a slope taken through |z| would vanish."""
    logits = torch.zeros(1, 4, requires_grad=True)
    weights, z = soft_topk(logits, 2, tau=1.0, return_z=True)
    upstream = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    (through_weights,) = torch.autograd.grad(weights, logits, upstream, retain_graph=True)
    (through_root,) = torch.autograd.grad(sqrt_weight(z), logits, upstream)
    own = torch.tensor([[0.75, -0.25, -0.25, -0.25]])
    torch.testing.assert_close(through_weights, 0.5 * own)
    torch.testing.assert_close(through_root, 0.25 * math.sqrt(2) * own)


@both_responses
def test_keeping_nothing_or_everything_is_exact_and_has_no_gradient(response):
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    tau = torch.tensor(0.5, requires_grad=True)
    k = torch.tensor([0.0, 5.0, 2.0, 3.0], requires_grad=True)
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[3, 3:] = False  # its three real tokens are all kept
    weights, z = soft_topk(logits, k, tau=tau, mask=mask, response=response, return_z=True)
    assert (weights[0] == 0).all() and (weights[1] == 1).all()
    assert weights[3].tolist() == [1, 1, 1, 0, 0]
    roots = sqrt_weight(z, response=response), sqrt_weight(-z, response=response)
    for root, exact in zip(roots, (weights, 1 - weights), strict=True):
        assert (root[[0, 1, 3]] == exact[[0, 1, 3]]).all()

    (weights.sin().sum() + roots[0].sin().sum() + 2 * roots[1].sin().sum()).backward()
    assert logits.grad is not None and k.grad is not None and tau.grad is not None
    assert (logits.grad[[0, 1, 3]] == 0).all() and (k.grad[[0, 1, 3]] == 0).all()
    assert (logits.grad[2] != 0).all() and k.grad[2] != 0
    assert tau.grad.isfinite()


def test_a_row_without_tokens_keeps_nothing():
    mask = torch.tensor([[False, False], [True, True]])
    weights, z = soft_topk(torch.zeros(2, 2), torch.tensor([0, 1]), tau=1.0, mask=mask, return_z=True)
    assert weights.tolist() == [[0, 0], [0.5, 0.5]]
    assert (z[0] == -math.inf).all()


@both_responses
def test_a_batch_without_tokens_has_no_weights(response):
    weights, z = soft_topk(torch.zeros(2, 0), 0, tau=1.0, response=response, return_z=True)
    assert weights.shape == z.shape == (2, 0)
    assert soft_topk(torch.zeros(0, 4), 2, tau=1.0, response=response).shape == (0, 4)


@both_responses
def test_a_row_gives_the_same_alone_and_padded_in_a_batch(response):
    row = make_logits(5, (1, 9), "normal", 2.0)
    alone, alone_z = soft_topk(row, 3, tau=0.2, response=response, return_z=True)
    logits = torch.full((2, 14), math.nan)  # padding may hold anything
    logits[0], logits[1, :9] = torch.linspace(-1, 1, 14), row[0]
    mask = torch.arange(14) < torch.tensor([[14], [9]])
    weights, z = soft_topk(logits, torch.tensor([5, 3]), tau=0.2, mask=mask, response=response, return_z=True)
    torch.testing.assert_close(weights[1:, :9], alone, rtol=0, atol=1e-7)
    torch.testing.assert_close(z[1:, :9], alone_z, rtol=1e-6, atol=1e-6)


def test_padding_gets_no_gradient_even_where_it_is_nan():
    logits = torch.tensor([[0.3, -0.2, 0.9, math.nan]], requires_grad=True)
    mask = torch.tensor([[True, True, True, False]])
    weights, z = soft_topk(logits, 1, tau=0.5, mask=mask, return_z=True)
    (grad,) = torch.autograd.grad((weights.sin() + sqrt_weight(z) + sqrt_weight(-z).sin()).sum(), logits)
    assert grad.isfinite().all() and grad[0, 3] == 0 and (grad[0, :3] != 0).all()


@both_responses
def test_no_gradient_is_ever_infinite_at_a_low_temperature_under_autocast(response):
    generator = torch.Generator().manual_seed(0)
    logits = (100 * torch.rand(4, 64, generator=generator) - 50).requires_grad_()
    tau = torch.tensor(0.01, requires_grad=True)
    x = torch.randn(4, 64, 8, generator=generator)
    readout = torch.randn(8, 1, generator=generator)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = (logits.unsqueeze(-1) @ torch.ones(1, 1)).squeeze(-1)
        assert scores.dtype == torch.bfloat16
        weights, z = soft_topk(scores, 7, tau=tau, response=response, return_z=True)
        out = vp_noise(x.bfloat16(), z, response=response, generator=generator) @ readout
        loss = out.float().square().mean() + weights.square().mean()
    loss.backward()
    assert logits.grad is not None and tau.grad is not None
    assert logits.grad.isfinite().all() and tau.grad.isfinite()
    assert weights.sum(-1).tolist() == pytest.approx([7.0] * 4, rel=1e-5)


def test_the_backward_pass_keeps_two_numbers_per_row_beside_its_inputs():
    logits = torch.randn(3, 50, requires_grad=True)
    saved: list[Tensor] = []

    def remember(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        soft_topk(logits, 5, tau=0.5)
    new = [tensor for tensor in saved if tensor.data_ptr() != logits.data_ptr()]
    assert len(new) < len(saved)
    assert all(tensor.untyped_storage().nbytes() <= 3 * 8 for tensor in new)


def test_inputs_are_left_as_they_were():
    logits = torch.randn(2, 9, dtype=torch.float64, requires_grad=True)
    before = logits.detach().clone()
    weights = soft_topk(logits, 3, tau=0.5)
    first = torch.autograd.grad(weights.sin().sum(), logits, retain_graph=True)
    second = torch.autograd.grad(weights.sin().sum(), logits)
    assert torch.equal(logits, before)
    assert torch.equal(first[0], second[0])


def test_a_second_derivative_is_refused():
    logits = torch.randn(1, 5, requires_grad=True)
    (grad,) = torch.autograd.grad(soft_topk(logits, 2, tau=1.0).sin().sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # what Dynamo itself does
def test_it_compiles_as_one_graph(unchecked):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 17, generator=generator, requires_grad=True)
    x, noise = torch.randn(2, 3, 17, 4, generator=generator)
    mask, k = make_mask(0, (3, 17)), torch.tensor([3, 2, 0])

    def throttle(logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, z = soft_topk(logits, k, tau=0.3, mask=mask, return_z=True)
        return weights, vp_noise(x, z, noise=noise)

    def run(function) -> tuple[Tensor, ...]:
        outputs = function(logits)
        return *outputs, *torch.autograd.grad(sum(output.square().sum() for output in outputs), logits)

    compiled = torch.compile(throttle, fullgraph=True, backend="aot_eager")
    for got, expected in zip(run(compiled), run(throttle), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": -1}, "k=-1 is not between 0 and the 4 tokens"),
        ({"k": 5}, "k=5 is not between 0 and the 4 tokens"),
        ({"k": torch.tensor([1, 5])}, "k=5 in row 1 is not between 0 and its 4 real tokens"),
        ({"k": torch.tensor([-0.5, 1.0])}, "k=-0.5 in row 0"),
        ({"k": torch.tensor([1.0, math.nan])}, "k=nan in row 1"),
        ({"k": 3, "mask": torch.tensor([[True] * 4, [True, True, False, False]])}, "k=3 in row 1 .* 2 real tokens"),
        ({"k": 1, "mask": torch.tensor([[False] * 4, [True] * 4])}, "k=1 in row 0 .* 0 real tokens"),
        ({"tau": 0}, "tau=0 is no temperature"),
        ({"tau": -0.5}, "tau=-0.5 is no temperature"),
        ({"tau": math.nan}, "tau is nan"),
        ({"tau": math.inf}, "tau=inf is no temperature"),
        ({"tau": torch.tensor([1.0, -2.0])}, "tau=-2 is no temperature"),
        ({"logits": torch.tensor([[0.0] * 4, [0.0, math.nan, 0.0, 0.0]])}, r"logits\[1, 1\] is nan"),
        ({"logits": torch.tensor([[0.0, 0.0, 0.0, math.inf], [0.0] * 4])}, r"logits\[0, 3\] is inf"),
    ],
)
def test_bad_input_is_refused_with_its_value(change, message):
    arguments = {"logits": torch.zeros(2, 4), "k": 2, "tau": 1.0, "mask": None} | change
    logits, k = arguments.pop("logits"), arguments.pop("k")
    with pytest.raises(ValueError, match=message):
        soft_topk(logits, k, **arguments)


def test_an_unknown_response_is_refused(unchecked):
    with pytest.raises(ValueError, match=r"response is 'relu' \(str\); give 'laplace' or 'sigmoid'"):
        soft_topk(torch.zeros(1, 3), 1, tau=1.0, response="relu")  # pyright: ignore
