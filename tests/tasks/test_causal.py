"""Scores without an attention mask: to the bit those with one."""

import pytest
import torch

from consilium.models.causal_lm.network import build_causal_lm
from consilium.tasks.language.task import token_losses


@pytest.mark.parametrize("lengths", [(31, 64, 5), (100, 7, 99, 100), (1, 9)])
def test_padding_on_the_right_changes_no_score(lengths: tuple[int, ...]) -> None:
    model, count, longest = build_causal_lm("tiny", None), len(lengths), max(lengths)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, model.config.vocab_size, (count, longest), generator=generator)
    mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
    labels, seen = ids.masked_fill(mask == 0, -100), []
    model.register_forward_pre_hook(lambda _, words, named: seen.append(named["attention_mask"]), with_kwargs=True)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    masked = token_losses(model, batch)[0].detach()
    with torch.no_grad():
        assert torch.equal(token_losses(model, batch)[0], masked)
    assert [one is None for one in seen] == [False, True]
