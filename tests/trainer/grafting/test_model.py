import torch
from torch import Tensor
from torch.nn import functional as F

from onesweep.stages.model.architecture import Architecture
from onesweep.stages.model.pipeline import ArStage
from onesweep.trainer.grafting.batch import read_all
from onesweep.trainer.grafting.model import EmbeddingCodes, GraftModel, decoding, fit_tuned_lenses


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


def text(model: GraftModel, windows: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.stages[0].architecture.vocabulary, (windows, 10), generator=generator)


def test_the_last_stage_needs_no_lens(model: GraftModel) -> None:
    lenses = fit_tuned_lenses(model.stages, text(model, 8, 0))
    width = model.stages[0].architecture.width
    assert lenses.shape == (3, width, width + 1)
    assert torch.equal(lenses[-1], torch.zeros(width, width + 1))


def test_a_lens_brings_what_the_head_reads_nearer_to_what_it_reads_at_the_end(model: GraftModel) -> None:
    lenses, unseen = fit_tuned_lenses(model.stages, text(model, 64, 0)), text(model, 8, 1)
    last = read_all(model.blocks, unseen)[0][:, 1:]
    x = unseen
    for block, lens in zip(model.blocks[:-1], lenses, strict=False):
        x, _ = block.read(x)
        plain = F.cosine_similarity(block.added.way_out(x[:, 1:]), model.final_norm(last), dim=2).mean()
        block.added.begin(model.stages[-1].norm, lens, None)
        assert F.cosine_similarity(block.added.way_out(x[:, 1:]), model.final_norm(last), dim=2).mean() > plain


def test_a_linear_stage_is_told_exactly() -> None:
    """Where the last features are a matrix times those before, the lens is that matrix."""
    torch.manual_seed(0)
    stages = [ArStage(Architecture(2, 1, 16, 2, 32), i) for i in range(2)]
    matrix = torch.eye(16) + 0.3 * torch.randn(16, 16)
    stages[1].read = lambda x, caches=None: x @ matrix.T  # type: ignore[method-assign]
    windows = torch.randint(256, (400, 12))
    lens = fit_tuned_lenses(stages, windows)[0]
    features = stages[0].read(windows[:8])[:, 1:].detach()
    found = features + features @ lens[:, :-1].T + lens[:, -1]
    assert F.cosine_similarity(found, features @ matrix.T, dim=2).min() > 0.98
