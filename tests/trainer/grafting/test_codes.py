from __future__ import annotations

import torch

from trainer.grafting.codes import EmbeddingCodes, decoding


def test_codes_have_norm_one_and_near_embeddings_have_near_codes() -> None:
    embedding = torch.randn(60, 12)
    embedding[1] = embedding[0] + 0.05 * torch.randn(12)
    codes = EmbeddingCodes.of_embedding(embedding, 6)
    torch.testing.assert_close(codes.table().norm(dim=1), torch.ones(60))
    assert codes.dim == 6
    assert codes.table()[0] @ codes.table()[1] > 0.95
    others = codes.table()[2:] @ codes.table()[0]
    assert float(others.max()) < float(codes.table()[0] @ codes.table()[1])


def test_the_way_back_is_exact_where_there_is_one() -> None:
    codes, matrix, offset = torch.randn(40, 5), torch.randn(9, 5), torch.randn(9)
    found = decoding(codes, codes @ matrix.T + offset)
    torch.testing.assert_close(found[0], matrix, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[1], offset, atol=1e-4, rtol=1e-4)
