"""A clip schedule is a schedule of the loss; the page of clips says how to write it, and that it is traced once."""

import pytest
import torch

from bqsgd._src.persample import L2, Normalize, PerLayer, clipped_gradients, program
from persample.persample_models import branches_on_values, case_of, conv2d, encoder
from persample.persample_oracle import clip_each, gradients_one_by_one


@pytest.mark.filterwarnings("ignore::bqsgd._src.persample.SlowGradientsWarning")
@pytest.mark.parametrize("build", [conv2d, encoder, branches_on_values], ids=lambda build: build.__name__)
def test_a_schedule_of_the_loss_is_a_schedule_of_the_clip(build, monkeypatch):
    """clip(g / s) at C is clip(g) at s C, divided by s, on every road, and a new s is no new program."""
    case = case_of(build, 0)
    gradients, model = gradients_one_by_one(case), case.model
    norm = float(gradients.norm(dim=1).median())
    model.register_buffer("clip_scale", torch.tensor(1.0))
    traced, trace = [], program.Program

    def counting(*args, **named):
        traced.append(args)
        return trace(*args, **named)

    monkeypatch.setattr(program, "Program", counting)

    def loss(outputs, targets):
        return case.loss(outputs, targets) / model.clip_scale

    def mean(clip):
        found = clipped_gradients(model, loss, case.batch, clip=clip, batch_size=case.samples, forward=case.forward)
        return found.mean.clone()

    for s in (1.0, 0.5, 0.1):
        model.clip_scale.fill_(s)
        for clip, then in (
            (L2(norm), L2(s * norm)),
            (PerLayer(L2(norm)), PerLayer(L2(s * norm))),
            (Normalize(norm, norm / 5), Normalize(s * norm, s * norm / 5)),
        ):
            expected = clip_each(gradients, then, case.sizes).mean(dim=0)
            assert s * mean(clip) == pytest.approx(expected, rel=1e-4, abs=1e-5 * s * norm)
            assert clip.sensitivity(batch_size=9) == then.sensitivity(batch_size=9)
    assert len(traced) <= 1


def test_a_clip_below_every_gradient_normalises_them():
    """`L2` with a small norm and `Normalize` with a small gamma are one clip in two units."""
    case = case_of(conv2d, 0)
    gradients = gradients_one_by_one(case)
    norm = 1e-3 * float(gradients.norm(dim=1).min())
    assert norm > 0
    means = [
        clipped_gradients(case.model, case.loss, case.batch, clip=clip, batch_size=case.samples).mean.clone() / own
        for clip, own in ((L2(norm), norm), (Normalize(1.0, norm / 1e3), 1.0))
    ]
    expected = (gradients / gradients.norm(dim=1, keepdim=True)).mean(dim=0)
    assert means[0] == pytest.approx(expected, abs=1e-5)
    assert means[1] == pytest.approx(expected, abs=1e-5)
