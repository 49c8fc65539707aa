"""Direct preference optimization, against Rafailov et al. (2023), equation 7, worked out record by record."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from consilium.adapters import adapter_state, lora
from consilium.adapters.kinds import LoraConfig
from consilium.core.errors import ConfigError, UnfitError
from consilium.core.schema import validate
from consilium.data.datalist import DataList, Loading
from consilium.data.text import Text
from consilium.models.causal_lm import CAUSAL_LM
from consilium.models.causal_lm.network import build_causal_lm, load_tokenizer
from consilium.tasks.language import LanguageConfig, metric_names
from consilium.tasks.language.task import LanguageTask
from consilium.tasks.language.tokens import IGNORED, Encoder
from tests.adapters.test_lora import randomize
from tests.tasks.test_conversations import MARKED, speaking

TOKENIZER = load_tokenizer("tiny", None)
PAIRS = (
    Text("training.jsonl:1", "Fever for days?", "", ("Call a doctor today.",), rejected="Wait."),
    Text("training.jsonl:2", "A rash?", "", ("It may wait.",), rejected="Take all that you have, and then some more of it."),
)


def task_of(*texts: Text, quiet: bool = False, length: int = 128, tokenizer: Any = TOKENIZER, **options: Any) -> LanguageTask:
    data = DataList(Path("site"), {"training": texts, "validation": (), "test": texts}, loading=Loading(ignore_unfit=quiet))
    config = LanguageConfig(name="language", learn=options.pop("learn", "preference"), **options)
    return LanguageTask(data, tokenizer, length, config)


def adapted(seed: int = 0) -> Any:
    model = build_causal_lm("tiny", None)
    lora.inject(model, LoraConfig(rank=2, alpha=4, targets=r".*\.(q_proj|v_proj)"), CAUSAL_LM)
    randomize(model)
    return model


def log_probability(model: Any, text: Text, answer: str) -> Tensor:
    """Return the log-probability of an answer behind its prompt, token by token, without batch, padding or mask."""
    prompt = TOKENIZER(text.prompt, add_special_tokens=False).input_ids
    row = [*prompt, *TOKENIZER(answer, add_special_tokens=False).input_ids, TOKENIZER.eos_token_id]
    logs = model(torch.tensor([row])).logits[0].log_softmax(-1)
    return sum((logs[at - 1, row[at]] for at in range(len(prompt), len(row))), torch.zeros(()))


def worked_margins(model: Any, beta: float) -> list[Tensor]:
    base, found = build_causal_lm("tiny", None).eval(), list[Tensor]()
    for text in PAIRS:
        with torch.no_grad():
            was = log_probability(base, text, text.outputs[0]) - log_probability(base, text, text.rejected)
        found.append(beta * (log_probability(model, text, text.outputs[0]) - log_probability(model, text, text.rejected) - was))
    return found


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_loss_and_gradients_are_the_papers(beta: float) -> None:
    model, task = adapted().eval(), task_of(*PAIRS, beta=beta)
    batch = task.batch([0, 1], seed=0)
    assert batch["input_ids"].shape[:2] == (2, 2)
    loss = task.loss(model, batch)
    loss.backward()
    found = gradients(model)
    model.zero_grad()
    margins = worked_margins(model, beta)
    wanted = -sum(torch.log(torch.sigmoid(one)) for one in margins) / 2
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), abs=2e-5)
    assert found.keys() == gradients(model).keys()
    assert len(found) > 4
    for name, value in gradients(model).items():
        torch.testing.assert_close(found[name], value, atol=2e-4 * float(value.abs().max()), rtol=0)


def test_the_scores_are_of_each_record() -> None:
    model, task = adapted().eval(), task_of(*PAIRS)
    found = task.evaluate(model, "test", 1, full=True)
    margins = [one.item() for one in worked_margins(model, 0.1)]
    assert found["reward_margin"] == pytest.approx(sum(margins) / 2, abs=2e-5)
    assert found["preferred"] == sum(one > 0 for one in margins) / 2
    assert found["loss"] == pytest.approx(sum(math.log1p(math.exp(-one)) for one in margins) / 2, abs=2e-5)
    assert found.keys() <= metric_names(task.config)
    assert task.scored is not None
    assert task.scored.values == pytest.approx([math.log1p(math.exp(-one)) for one in margins], abs=2e-5)


def test_the_base_prefers_nothing() -> None:
    """Its rewards are 0 whether its adapter is new or switched off, also within a block that has switched it off before."""
    fresh = build_causal_lm("tiny", None)
    lora.inject(fresh, LoraConfig(rank=2, alpha=4, targets=r".*\.(q_proj|v_proj)"), CAUSAL_LM)
    task = task_of(*PAIRS)
    assert task.evaluate(fresh, "test", 2)["loss"] == pytest.approx(math.log(2), abs=1e-6)
    trained = adapted()
    with adapter_state.disable_adapter(trained):
        assert task.evaluate(trained, "test", 1)["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert abs(task.evaluate(trained, "test", 1)["loss"] - math.log(2)) > 1e-3


def test_a_frozen_factor_stays_frozen() -> None:
    """PEFT trains every factor of a layer that is switched on again; FFA-LoRA keeps A as it is."""
    model, task = adapted(), task_of(*PAIRS)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    task.loss(model, task.batch([0, 1], seed=0)).backward()
    assert {name.split(".")[-3] for name in gradients(model)} == {"lora_B"}


def test_records_are_of_the_kind_that_is_learned() -> None:
    plain = Text("training.jsonl:3", "A cough?", "", ("Rest.",))
    with pytest.raises(
        UnfitError, match=r"training.jsonl:3: a record without a rejected answer, where task.learn is preference"
    ):
        task_of(*PAIRS, plain)
    with pytest.raises(UnfitError, match=r"training.jsonl:1: a record with a rejected answer, where task.learn is answer; use"):
        task_of(*PAIRS, learn="answer")
    quiet = task_of(*PAIRS, plain, quiet=True)
    assert math.isfinite(quiet.evaluate(adapted(), "test", 3)["loss"])


def test_both_answers_follow_the_prompt_that_leaves_room_for_the_longer_one() -> None:
    better, worse = "Call now.", "Take all that you have, and then some."
    text = Text("training.jsonl:1", "A rash and fever for days. " * 20, "", (better,), rejected=worse)
    asked, *answers = (TOKENIZER(one, add_special_tokens=False).input_ids for one in (text.instruction, better, worse))
    room = 64 - len(answers[1]) - 1
    assert 32 <= room < 64 - len(answers[0]) - 1
    prompt = asked[: room // 2] + asked[-(room - room // 2) :]
    for pair, order in ((text, (0, 1)), (replace(text, outputs=(worse,), rejected=better), (1, 0))):
        batch = task_of(pair, length=64, prompt="{instruction}").batch([0], 0)
        for row, mask, which in zip(batch["input_ids"][0], batch["attention_mask"][0], order, strict=True):
            assert row[mask.bool()].tolist() == [*prompt, *answers[which], TOKENIZER.eos_token_id]


def test_a_marked_chat_is_cut_for_both_answers_where_one_is_too_long() -> None:
    words = "A rash and fever for days. " * 5
    text = Text("training.jsonl:1", words, "", ("Call.",), rejected="Take all that you have, and then some more.")
    tokenizer = speaking(MARKED)
    encoder = Encoder(tokenizer, 1000, "chat")
    whole = [len(encoder.encode_record(Text("", words, "", (said,))).ids) for said in (text.outputs[0], text.rejected)]
    assert whole[0] < whole[1] - 8
    batch = task_of(text, length=whole[1] - 8, tokenizer=tokenizer, prompt="chat").batch([0], 0)
    starts = [int((labels != IGNORED).nonzero()[0]) for labels in batch["labels"][0]]
    prompts = [row[:start].tolist() for row, start in zip(batch["input_ids"][0], starts, strict=True)]
    assert prompts[0] == prompts[1]


def test_a_record_counts_as_cut_where_either_answer_is(caplog: pytest.LogCaptureFixture) -> None:
    long = Text("training.jsonl:3", "A cough? " * 40, "", ("Rest.",), rejected="Run and swim and dance. " * 40)
    found = task_of(PAIRS[0], long, length=64, prompt="{instruction}").evaluate(adapted(), "test", 2)
    assert (found["cut_prompts"], found["cut_answers"]) == (0.5, 0.5)
    assert "2 prompts lost their middle, 2 answers their end" in caplog.text  # one in each of two splits


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learn": "preference", "packed": True}, r"packed: True: expected false where learn is preference, .*; use false"),
        ({"beta": 0.5}, r"beta: 0\.5: expected 0\.1 where learn is not preference; remove it, or use learn: preference"),
    ],
)
def test_settings_that_do_not_fit_what_is_learned_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(LanguageConfig, {"name": "language"} | settings, "job.yaml")


def test_steps_make_the_better_answer_likelier() -> None:
    model, task = adapted(), task_of(*PAIRS, beta=0.5)
    before = task.evaluate(model, "test", 2)["reward_margin"]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(5):
        optimizer.zero_grad()
        task.loss(model, task.batch([0, 1], seed=0)).backward()
        optimizer.step()
    assert task.evaluate(model, "test", 2)["reward_margin"] > before
