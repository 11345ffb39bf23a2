import pytest
import torch

from diffprune.nn import BlockSpec, DiagonalBlock
from diffprune.ops import soft_topk
from diffprune.results import read_results
from diffprune_lab.studies import bench


def test_the_bisection_reference_has_the_values_and_gradients_of_soft_topk():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 40, generator=generator, requires_grad=True)
    upstream = torch.randn(3, 40, generator=generator)
    ours, reference = soft_topk(logits, 9, tau=0.5), bench.bisection_topk(logits, 9, 0.5)
    torch.testing.assert_close(ours, reference)
    torch.testing.assert_close(
        torch.autograd.grad(ours, logits, upstream), torch.autograd.grad(reference, logits, upstream)
    )


def test_the_masked_reference_has_the_values_of_the_diagonal_block():
    torch.manual_seed(0)
    diagonal = DiagonalBlock(BlockSpec(width=8, heads=2, mlp_width=16))
    for parameter in diagonal.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 5, 8)
    reference = bench.masked_block(diagonal.block, x, torch.eye(5, dtype=torch.bool))
    torch.testing.assert_close(diagonal(x), reference)


def test_every_benchmark_becomes_a_row_of_the_results_file(tmp_path, monkeypatch, capsys):
    small = [
        bench.soft_topk_benchmark(2, 20, 4, "cpu"),
        bench.sort_benchmark(50, "cpu"),
        bench.diagonal_benchmark(1, 6, 64, "cpu"),
    ]
    monkeypatch.setattr(bench, "benchmarks", lambda device: iter(small))
    out = tmp_path / "bench_cpu.json"
    bench.main(["--out", str(out), "--seconds", "0"])
    results = read_results(out)
    assert results.name == "bench_cpu"
    assert [row["name"] for row in results.rows] == [benchmark.name for benchmark in small]
    faster, cost, _ = results.rows
    assert faster["ratio"] == pytest.approx(faster["reference_ms"] / faster["ours_ms"])
    assert cost["ratio"] == pytest.approx(cost["ours_ms"] / cost["reference_ms"])
    assert "soft_topk" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_one_sentence(tmp_path, capsys):
    with pytest.raises(SystemExit):
        bench.main(["--device", "cuda", "--out", str(tmp_path / "bench_gpu.json")])
    assert "torch sees no GPU here" in capsys.readouterr().err


def test_a_pruned_question_is_timed_against_the_full_one():
    benchmark = bench.ask_benchmark("cpu", backbone="scenes-nano", keep=16, new_tokens=2)
    ours, reference = benchmark.ours(), benchmark.reference()
    assert isinstance(ours, torch.Tensor) and isinstance(reference, torch.Tensor)
    assert ours.shape == reference.shape == (1, 2)  # answers of one length, so that the times compare
    assert "16 tokens against all" in benchmark.name
