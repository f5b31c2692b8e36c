"""Training that spends and moves nothing says so after its first step."""

import pytest
import torch
from torch import nn

import bqsgd


def frozen_and_adapter():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    return model


def test_a_step_that_moves_nothing_is_an_error(private):
    model = nn.Linear(4, 2)
    made = private(model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-30))
    with pytest.raises(bqsgd.InvalidParameter, match="moved no trained parameter"):
        made.step(next(iter(made.loader)))
    assert made.steps == 1


def test_a_learning_rate_that_begins_at_zero_is_looked_at_later(private):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    made = private(model, optimizer=optimizer)
    batches = iter(made.loader)
    made.step(next(batches))
    optimizer.param_groups[0]["lr"] = 1e-30
    with pytest.raises(bqsgd.InvalidParameter, match="moved no trained parameter"):
        made.step(next(batches))
    optimizer.param_groups[0]["lr"] = 0.1
    made.step(next(batches))


def test_parameters_that_do_not_move_or_should_not_have_moved_are_named(private, caplog):
    model = frozen_and_adapter()
    groups = [{"params": [model[1].weight], "lr": 1e-30}, {"params": [model[1].bias, *model[0].parameters()]}]
    made = private(model, optimizer=torch.optim.SGD(groups, lr=0.1, weight_decay=0.1))
    made.optimizer.register_step_pre_hook(lambda *_: setattr(model[0].bias, "grad", torch.zeros(3)))
    made.step(next(iter(made.loader)))
    assert "did not move 1.weight;" in caplog.text
    assert "changed 0.bias, which are frozen" in caplog.text


def test_it_is_quiet_where_all_is_well(private, caplog):
    model = frozen_and_adapter()
    made = private(model, optimizer=torch.optim.Adam(model[1].parameters(), lr=0.1))
    for batch in made.loader:
        made.step(batch)
    assert "first step" not in caplog.text
    assert "frozen" not in caplog.text
