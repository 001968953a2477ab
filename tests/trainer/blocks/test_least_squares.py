import torch

from trainer.distill.student import LeastSquares


def test_rows_that_come_in_pieces_give_the_matrix_behind_them() -> None:
    torch.manual_seed(0)
    x, matrix = torch.randn(500, 6, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    fit = LeastSquares(6, 4)
    for piece in x.split(70):
        fit.add(piece, piece @ matrix)
    torch.testing.assert_close(fit.solve(), matrix, atol=0.01, rtol=0)


def test_a_direction_that_hardly_occurs_is_not_trusted() -> None:
    torch.manual_seed(0)
    x = torch.randn(500, 3, dtype=torch.float64)
    x[:, 1] *= 1e-4
    fit = LeastSquares(3, 1)
    fit.add(x, x[:, :1] + 5 * x[:, 1:2])
    weights = fit.solve()[:, 0]
    assert abs(weights[0] - 1) < 0.01
    assert abs(weights[1]) < 0.1, "held back"
