"""Gradients of a look at the data: of what the loss depends on, and 0 of all else."""

import torch

from consilium.training.gradient_probe import gradients_of


def test_what_a_loss_does_not_depend_on_has_gradient_0_even_where_that_is_all() -> None:
    used, unused = torch.tensor([2.0], requires_grad=True), torch.ones(3, requires_grad=True)
    found = gradients_of(used.square().sum(), {"used": used, "unused": unused})
    assert found["used"].tolist() == [4.0]
    assert found["unused"].tolist() == [0.0] * 3
    assert gradients_of(torch.tensor(1.0), {"unused": unused})["unused"].tolist() == [0.0] * 3
