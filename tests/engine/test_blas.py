import pytest
import torch

from distflow.engine import blas
from distflow.engine.blas import ByNumpy, ByTorch, Matrix, matrix


@pytest.mark.parametrize("kind", [ByTorch, ByNumpy])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("columns", [False, True])
def test_a_matrix_is_a_linear_layer(kind: type[ByTorch | ByNumpy], biased: bool, columns: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(5, 3).T.contiguous().T if columns else torch.randn(5, 3)
    bias = torch.randn(5) if biased else None
    made: Matrix = kind(weight, bias)
    x, to = torch.randn(4, 6)[:, ::2], torch.randn(4, 5)
    with torch.inference_mode():
        for _ in range(2):
            right = torch.nn.functional.linear(x, weight, bias)
            torch.testing.assert_close(made(x), right)
            torch.testing.assert_close(made.add(to.clone(), x), to + right)
            weight.mul_(2)  # weights change where they are
        place = to.clone()
        assert made.add(place, x) is place


def test_numpy_is_asked_only_where_it_is_better(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, threads = torch.randn(5, 3, requires_grad=True), torch.get_num_threads()
    monkeypatch.setattr(blas, "_by_amd", lambda: True)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    try:
        torch.set_num_threads(1)
        assert isinstance(matrix(weight), ByNumpy)
        assert isinstance(matrix(weight.bfloat16()), ByTorch)
        monkeypatch.delenv("OPENBLAS_NUM_THREADS")
        monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which it goes by then
        assert isinstance(matrix(weight), ByNumpy)
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
        assert isinstance(matrix(weight), ByTorch)
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
        monkeypatch.setattr(blas, "_by_amd", lambda: False)
        assert isinstance(matrix(weight), ByTorch)
        monkeypatch.setattr(blas, "_by_amd", lambda: True)
        torch.set_num_threads(2)
        assert isinstance(matrix(weight), ByTorch)
    finally:
        torch.set_num_threads(threads)
