"""The output layer of a language model computes what is learned and nothing else, with the losses of all logits."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from consilium.models.causal_lm.network import build_causal_lm
from consilium.tasks.language.losses import learned_positions, losses_at, mean_loss, token_losses
from consilium.tasks.language.tokens import IGNORED

LABELS = torch.tensor([[IGNORED, IGNORED, 5, 6, 7], [IGNORED, 3, 4, IGNORED, IGNORED]])
BATCH = {
    "input_ids": torch.tensor([[1, 2, 5, 6, 7], [1, 3, 4, 0, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
    "labels": LABELS,
}


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=11, max_position_embeddings=16, **sizes))


class OwnHead(nn.Module):
    """A model that multiplies by its output layer's weight itself, so that nothing can be chosen before."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()

    def get_output_embeddings(self) -> nn.Module:
        return self.model.lm_head

    def forward(self, **inputs: Any) -> Any:
        found = self.model.model(**inputs)
        found.logits = found.last_hidden_state @ self.model.lm_head.weight.T
        return found


@pytest.mark.parametrize("made", [llama, OwnHead])
def test_losses_and_gradients_are_those_of_all_logits(made: Any) -> None:
    model = made()
    logits = model(input_ids=BATCH["input_ids"], attention_mask=BATCH["attention_mask"], use_cache=False).logits[:, :-1]
    wanted = F.cross_entropy(logits.flatten(0, 1), LABELS[:, 1:].flatten(), ignore_index=IGNORED, reduction="none").view(2, 4)
    found, learned = token_losses(model, BATCH)
    torch.testing.assert_close(found, wanted)
    assert learned.tolist() == [[False, True, True, True], [True, True, False, False]]
    parameters = list(model.parameters())
    (wanted.sum(1) / torch.tensor([3, 2])).mean().backward()
    gradients = [p.grad.clone() for p in parameters if p.grad is not None]
    model.zero_grad(set_to_none=True)
    mean_loss(model, BATCH).backward()
    torch.testing.assert_close([p.grad for p in parameters if p.grad is not None], gradients)


def test_the_output_layer_sees_learned_positions_alone_and_is_left_as_it_was() -> None:
    model, seen = llama(), list[torch.Size]()
    model.lm_head.register_forward_hook(lambda module, given, out: seen.append(out.shape))
    token_losses(model, BATCH)
    assert seen == [(1, 5, 11)]
    assert model(input_ids=BATCH["input_ids"]).logits.shape == (2, 5, 11)


def test_a_batch_without_a_learned_token_has_no_loss() -> None:
    targets = torch.full((1, 3), IGNORED)
    places: Tensor = learned_positions(targets)
    ids = torch.tensor([[1, 2, 3]])
    assert losses_at(llama(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, targets, places).shape == (0,)


@pytest.mark.parametrize("lengths", [(31, 64, 5), (100, 7, 99, 100), (1, 9)])
def test_padding_on_the_right_changes_no_score(lengths: tuple[int, ...]) -> None:
    """Scores without an attention mask equal those with one to the bit."""
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
