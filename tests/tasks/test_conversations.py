"""Conversations: which tokens are learned, against masks of TRL; system prompts; and what cannot be followed."""

import itertools
import logging
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from consilium.core.errors import CheckpointError, UnfitError
from consilium.core.schema import validate
from consilium.data.datalist import DataList, Loading
from consilium.data.text import Text
from consilium.tasks.language import LanguageConfig
from consilium.tasks.language.task import LanguageTask
from consilium.tasks.language.tokens import IGNORED, Encoder
from tests.tasks.test_prompts import chatting

LLAMA_3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
PHI_3 = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>\n' + message['content'] + '<|end|>\n'}}"
    "{% elif message['role'] == 'user' %}{{'<|user|>\n' + message['content'] + '<|end|>\n'}}"
    "{% elif message['role'] == 'assistant' %}{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
"""As their publishers have them."""
PHI_3_MARKED = PHI_3.replace(
    "'<|assistant|>\n' + message['content'] + '<|end|>\n'}}",
    "'<|assistant|>\n'}}{% generation %}{{ message['content'] + '<|end|>\n'}}{% endgeneration %}",
).replace("{% else %}{{ eos_token }}{% endif %}", "{% else %}{% generation %}{{ eos_token }}{% endgeneration %}{% endif %}")
"""With the marks of TRL's phi3_training.jinja."""
TEMPLATES = Path(__file__).parent / "templates"
QWEN_3, LFM_2 = ((TEMPLATES / f"{name}.jinja").read_text() for name in ("qwen3_instruct_2507", "lfm2"))
"""As shipped with Qwen3-4B-Instruct-2507 and LFM2; TRL 1.16.0 (Apache-2.0) has these two files under the same names."""
SPECIAL = (
    "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<start_of_turn>", "<end_of_turn>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>",
)  # fmt: skip
SMOLLM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<s>system\nYou help.</s>\n' }}"
    "{% endif %}{{'<s>' + message['role'] + '\n' + message['content'] + '</s>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
"""SmolLM2's, with the tiny tokenizer's special tokens and a shorter system prompt."""
ONE = Text("training.jsonl:1", "Is it urgent?", "", ("Yes. Call now.",))
TWO = Text(
    "training.jsonl:2", "And the rash?", "", ("It needs a look too.",), history=(("Fever for 3 days.", "See a doctor."),)
)
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": role, "content": words} for role, words in turns]}
    for turns in (
        [("system", "Be kind."), ("user", "Fever?"), ("assistant", "Rest.")],
        [("user", "a secret"), ("assistant", "Rest.")],
        [("user", "Fever?"), ("assistant", "Rest.")],
        [("user", "Fever?"), ("assistant", "Rest."), ("user", "And a rash?"), ("assistant", "Call.")],
    )
]
REFUSING = "{% if 'secret' in messages[0].content %}{{ raise_exception('x') }}{% endif %}" + GEMMA
NO_PLACE = {
    "chat": {
        1: "system: the tokenizer's chat template takes no system prompt",
        2: "template fails for a record",
    },
    "alpaca": {4: "a conversation of several turns"},
}
"""Which records of CHATS a prompt refuses with the template REFUSING, and why."""
TRL = {
    ("llama3", 1): [24, 12], ("llama3", 2): [27, 10, 27, 15], ("gemma", 1): [18, 13], ("gemma", 2): [21, 11, 21, 16],
    ("phi3", 1): [11, 14], ("phi3", 2): [14, 11, 15, 17], ("qwen3", 1): [20, 13], ("qwen3", 2): [23, 11, 24, 16],
    ("lfm2", 1): [21, 13], ("lfm2", 2): [24, 11, 24, 16],
}  # fmt: skip
"""How many tokens in turn are not learned and learned, by TRL 1.16.0: its `return_assistant_tokens_mask`
of the tiny tokenizer with SPECIAL added, and TRL's templates llama3_training, gemma_training, phi3_training,
qwen3_instruct_2507_training and lfm2_training."""
SUMS = {
    ("llama3", 1): 7944, ("llama3", 2): 17668, ("gemma", 1): 6411, ("gemma", 2): 14602, ("phi3", 1): 5165, ("phi3", 2): 12109,
    ("qwen3", 1): 6915, ("qwen3", 2): 15611, ("lfm2", 1): 6916, ("lfm2", 2): 15612,
}  # fmt: skip
"""The sums of the tokens' numbers there."""


def speaking(template: str) -> Any:
    tokenizer = chatting(template)
    tokenizer.add_tokens(list(SPECIAL), special_tokens=True)
    return tokenizer


def numbered(template: str) -> Any:
    """Return the tiny tokenizer with SPECIAL in this order, whose numbers of tokens SUMS adds."""
    tokenizer = chatting(template)
    tokenizer = type(tokenizer).from_pretrained(tokenizer.name_or_path)
    tokenizer.add_tokens(list(SPECIAL), special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


def encoder(template: str, most: int = 1000, **more: Any) -> Encoder:
    return Encoder(speaking(template), most, "chat", **more)


def learned(made: Encoder, text: Text) -> str:
    found = made.encode_record(text)
    return made.tokenizer.decode([token for token, label in zip(found.ids, found.labels, strict=True) if label != IGNORED])


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("llama3", LLAMA_3), ("gemma", GEMMA), ("phi3", PHI_3), ("phi3", PHI_3_MARKED), ("qwen3", QWEN_3), ("lfm2", LFM_2),
    ],
    ids=["llama3", "gemma", "phi3", "phi3 marked", "qwen3", "lfm2"],
)  # fmt: skip
@pytest.mark.parametrize("text", [ONE, TWO], ids=["one turn", "two turns"])
def test_learned_tokens_are_those_of_trls_assistant_masks(name: str, template: str, text: Text) -> None:
    found = Encoder(numbered(template), 1000, "chat").encode_record(text)
    runs = [len(list(group)) for _, group in itertools.groupby(label != IGNORED for label in found.labels)]
    key = (name, 1 + len(text.history))
    assert (runs, sum(found.ids)) == (TRL[key], SUMS[key])


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed: pip install trl into an environment of its own")
@pytest.mark.parametrize(
    "name",
    [
        "llama3",
        "gemma",
        "gemma3",
        "phi3",
        "phi3_5",
        "qwen3_instruct_2507",
        "qwen3_vl",
        "qwen2_5_vl",
        "lfm2",
        "lfm2_v2",
        "lfm2_2_5",
    ],
)
@pytest.mark.parametrize("text", [ONE, TWO], ids=["one turn", "two turns"])
def test_masks_equal_those_that_trl_computes_here(name: str, text: Text) -> None:
    """As its SFTTrainer does with assistant_only_loss: by TRL's training template, for the templates that TRL ships."""
    from trl import chat_template_utils as trl

    tokenizer = numbered((Path(trl.__file__).parent / f"chat_templates/{name}.jinja").read_text())
    pairs = [*text.history, (text.instruction, text.outputs[0])]
    turns = [{"role": role, "content": said} for pair in pairs for role, said in zip(("user", "assistant"), pair, strict=True)]
    template = trl.get_training_chat_template(tokenizer)
    wanted = tokenizer.apply_chat_template(
        turns, chat_template=template, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    found = Encoder(tokenizer, 1000, "chat").encode_record(text)
    masks, key = wanted["assistant_masks"], (name.removesuffix("_instruct_2507"), 1 + len(text.history))
    assert found.ids == wanted["input_ids"]
    assert [label != IGNORED for label in found.labels] == [bool(one) for one in masks]
    if key in TRL:  # the numbers of the test above
        assert [len(list(group)) for _, group in itertools.groupby(masks)] == TRL[key]
        assert sum(wanted["input_ids"]) == SUMS[key]


def test_a_conversation_is_written_as_the_tokenizer_writes_it() -> None:
    tokenizer = speaking(SMOLLM)
    found = Encoder(tokenizer, 1000, "chat").encode_record(replace(TWO, system="You are a nurse."))
    (earlier,) = TWO.history
    words = [("system", "You are a nurse."), *zip(("user", "assistant"), earlier, strict=True), ("user", TWO.instruction)]
    turns = [{"role": role, "content": content} for role, content in [*words, ("assistant", TWO.outputs[0])]]
    assert found.ids == tokenizer.apply_chat_template(turns, tokenize=True)["input_ids"]


def test_earlier_answers_of_a_prompt_are_given_and_not_learned() -> None:
    assert learned(encoder(SMOLLM), TWO) == "See a doctor.</s>\nIt needs a look too.</s>\n"
    given = replace(TWO, learns_history=False)
    assert learned(encoder(SMOLLM), given) == "It needs a look too.</s>\n"
    assert learned(encoder(PHI_3_MARKED), given) == "It needs a look too.<|end|>\n</s>"


def test_a_prompt_to_be_answered_has_the_earlier_turns() -> None:
    made = encoder(SMOLLM)
    said = made.tokenizer.decode(made.prompt(TWO, 1000)[0])
    assert said.endswith("<s>assistant\nSee a doctor.</s>\n<s>user\nAnd the rash?</s>\n<s>assistant\n")


def test_special_tokens_in_a_conversation_s_own_words_are_letters() -> None:
    made = encoder(SMOLLM)
    sly = replace(TWO, history=(("a</s>b", "c<s>d"),), system="e</s>f")
    ends = made.encode_record(sly).ids.count(made.tokenizer.eos_token_id)
    assert ends == made.encode_record(replace(TWO, system="e f")).ids.count(made.tokenizer.eos_token_id)
    assert learned(made, sly) == "c<s>d</s>\nIt needs a look too.</s>\n"


def test_a_conversation_over_the_context_is_refused_and_fits_when_the_context_is_raised() -> None:
    with pytest.raises(UnfitError, match=r"l:2: a conversation of (\d+) tokens, over model\.max_length 30") as found:
        encoder(SMOLLM, 30).encode_record(TWO)
    needed = int(str(found.value).split(" tokens")[0].split()[-1])
    assert len(encoder(SMOLLM, needed).encode_record(TWO).ids) == needed == encoder(SMOLLM, 30).full_length(TWO)


def test_a_prompt_of_one_question_refuses_several_turns() -> None:
    made = Encoder(speaking(SMOLLM), 1000, "alpaca")
    with pytest.raises(UnfitError, match=r"training\.jsonl:2: a conversation of several turns, .* use task.prompt: chat"):
        made.encode_record(TWO)
    said = made.tokenizer.decode(made.encode_record(replace(ONE, system="You are a nurse.")).ids)
    assert said.startswith("You are a nurse.\n\nBelow is a task.")


@pytest.mark.parametrize(
    "template", [GEMMA, "{% for m in messages if m.role != 'system' %}" + PHI_3.partition("%}")[2].replace("message", "m")]
)
def test_a_system_prompt_that_the_template_refuses_or_drops_is_refused(template: str) -> None:
    made = encoder(template)
    with pytest.raises(UnfitError, match=r"system: the tokenizer's chat template takes no system prompt; move its words"):
        made.encode_record(replace(ONE, system="You are a nurse."))
    assert made.encode_record(replace(ONE, instruction=f"You are a nurse. {ONE.instruction}")).ids


@pytest.mark.parametrize(
    "more", ["{% for m in messages %}<s>x</s>{% endfor %}", "{% if messages|length > 2 %}{{ nothing.at.all }}{% endif %}"]
)
def test_a_template_that_cannot_write_a_conversation_is_one_line(more: str) -> None:
    template = f"{{% if messages|length > 2 %}}{more}{{% else %}}{SMOLLM}{{% endif %}}"
    why = r"prompt: 'chat': the tokenizer's template (changes, repeats|fails for a record)"
    with pytest.raises(CheckpointError, match=why):
        encoder(template).encode_record(TWO)


MARKED = (
    "{% for m in messages %}<s>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "END</s>\n{% else %}{{ m.content }}</s>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
"""With marks around the words of an answer alone. END is written behind them."""


def test_all_marked_parts_of_the_only_learned_answer_are_learned() -> None:
    """Where a record learns its last answer only, and the template writes unmarked words between two parts of an answer."""
    made = encoder(MARKED.replace("END</s>", " so {% generation %}END</s>{% endgeneration %}"))
    assert learned(made, TWO) == "See a doctor.END</s>It needs a look too.END</s>"
    assert learned(made, replace(TWO, learns_history=False)) == "It needs a look too.END</s>"


def test_an_empty_answer_learns_its_end_where_marks_hold_nothing() -> None:
    """Without a learned token its loss would be 0 / 0."""
    made = encoder(MARKED.replace("END", ""))
    assert learned(made, ONE) == "Yes. Call now."
    assert learned(made, replace(ONE, outputs=("",))) == "</s>\n"


def test_a_template_that_fails_for_a_record_s_words_reveals_no_site() -> None:
    """In a list that ignores unfit samples the record becomes empty, also where only its prompt alone fails."""
    refuses = "{% if 'secret' in messages[0].content %}{{ raise_exception('x') }}{% endif %}"
    asked = MARKED.replace("{% if add_generation_prompt %}", "{% if add_generation_prompt %}" + refuses)
    config = validate(LanguageConfig, {"name": "language", "prompt": "chat", "evaluate": "generation"}, None)
    splits = {"training": (), "validation": (), "test": (replace(ONE, instruction="a secret"),)}
    for template in (refuses + SMOLLM, asked):
        task = LanguageTask(DataList(Path(), splits, Loading(ignore_unfit=True)), speaking(template), 1000, config)
        assert task.data.splits["test"][0].instruction == ""
    with pytest.raises(
        UnfitError, match=r"training\.jsonl:1: task\.prompt: 'chat': the tokenizer's template fails for a record"
    ):
        LanguageTask(DataList(Path(), splits), speaking(refuses + SMOLLM), 1000, config)


@pytest.mark.parametrize(("form", "record"), [("chat", replace(ONE, system="You are a nurse.")), ("alpaca", TWO)])
def test_a_record_that_the_prompt_has_no_place_for_reveals_no_site(form: str, record: Text) -> None:
    """In a list that ignores unfit samples a system prompt, or a conversation, that the job cannot ask is an empty record."""
    config = validate(LanguageConfig, {"name": "language", "prompt": form}, None)
    splits = {"training": (record,), "validation": (), "test": ()}
    (found,) = LanguageTask(DataList(Path(), splits, Loading(ignore_unfit=True)), speaking(GEMMA), 1000, config).data.splits[
        "training"
    ]
    assert (found.instruction, found.system, found.history) == ("", "", ())
    with pytest.raises(UnfitError):
        LanguageTask(DataList(Path(), splits), speaking(GEMMA), 1000, config)


def test_marks_around_nothing_are_refused() -> None:
    with pytest.raises(CheckpointError, match="marks no word of an answer"):
        encoder(SMOLLM + "{% if false %}{% generation %}{% endgeneration %}{% endif %}").encode_record(ONE)


@pytest.mark.parametrize(("template", "said"), [(SMOLLM, "You help."), (PHI_3, ""), (GEMMA, ""), (LLAMA_3, "")])
def test_the_template_s_own_system_prompt_is_said(template: str, said: str, caplog: pytest.LogCaptureFixture) -> None:
    config = validate(LanguageConfig, {"name": "language", "prompt": "chat"}, None)
    data = DataList(None, {"training": (ONE,), "validation": (), "test": ()})
    with caplog.at_level(logging.WARNING):
        LanguageTask(data, speaking(template), 1000, config)
    assert ("system prompt of its own, 'You help.'" in caplog.text) == bool(said)
    caplog.clear()
    told = DataList(None, {"training": (replace(ONE, system="Be kind."),), "validation": (), "test": ()})
    if said:
        LanguageTask(told, speaking(template), 1000, config)
        assert "of its own" not in caplog.text


@pytest.mark.parametrize("template", [LLAMA_3, PHI_3])
@pytest.mark.parametrize("strange", ["\ue000", "\ue0000\ue000", "\ue0001\ue000", "\ue001\ue000\ue002", "\uf8ff", "\U0010fffd"])
def test_private_characters_of_a_record_are_words_like_others(template: str, strange: str) -> None:
    """A record with them gives the tokens that it has with a letter in their place, but for that letter's own."""
    writer, letter = encoder(template), "Q"
    fields = {"instruction": "a {} b", "input": "c {} d", "system": "e {} f"}

    def tokens(word: str) -> tuple[str, str]:
        own = {key: value.replace("{}", word) for key, value in fields.items()}
        history = ((f"g {word} h", f"i {word} j"),)
        record = Text("x:1", outputs=(f"k {word} l",), history=history, **own)
        whole = writer.encode_record(record)
        learned = [one for one, label in zip(whole.ids, whole.labels, strict=True) if label != IGNORED]
        return writer.decode(whole.ids), writer.decode(learned)

    assert tuple(said.replace(strange, letter) for said in tokens(strange)) == tokens(letter)
