"""Forms of records as the Hub and TRL have them: what becomes of each, and what is refused because it would be lost."""

from pathlib import Path
from typing import Any

import pytest

from consilium.core.errors import DataError
from consilium.data.text import Text, read_records, read_texts
from tests.conftest import refused
from tests.data.writing import write


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content} | more


ASK, TELL = said("user", "Fever?"), said("assistant", "Drink.")
MORE = [ASK, TELL, said("user", "Rash?"), said("assistant", "See a doctor.")]


def read(folder: Path, *records: object) -> tuple[Text, ...]:
    return read_texts(write(folder, "training.jsonl", *records)).splits["training"]


@pytest.mark.parametrize(
    ("record", "system", "history", "learns"),
    [
        ({"messages": MORE}, "", (("Fever?", "Drink."),), True),
        ({"messages": [said("system", "Be kind."), *MORE]}, "Be kind.", (("Fever?", "Drink."),), True),
        ({"messages": [said("developer", "Be kind."), *MORE[2:]], "tools": []}, "Be kind.", (), True),
        ({"messages": [said("user", [{"type": "text", "text": "Rash?"}]), MORE[3]]}, "", (), True),
        ({"conversations": [{"from": "human", "value": "Rash?"}, {"from": "gpt", "value": "See a doctor."}]}, "", (), True),
        ({"prompt": "Rash?", "completion": "See a doctor."}, "", (), True),
        ({"prompt": MORE[:3], "completion": MORE[3:]}, "", (("Fever?", "Drink."),), False),
        ({"prompt": [said("system", "Be kind."), MORE[2]], "completion": MORE[3:]}, "Be kind.", (), False),
        ({"question": "Rash?", "answer": "See a doctor.", "source": "NIH"}, "", (), True),
        ({"instruction": "Rash?", "input": "", "output": "See a doctor.", "system": "Be kind."}, "Be kind.", (), True),
        ({"instruction": "Rash?", "output": "See a doctor.", "text": "Below is an instruction ..."}, "", (), True),
    ],
)
def test_every_form_says_the_same(
    record: dict[str, Any], system: str, history: tuple[tuple[str, str], ...], learns: bool, tmp_path: Path
) -> None:
    (text,) = read(tmp_path, record)
    assert (text.instruction, text.outputs) == ("Rash?", ("See a doctor.",))
    assert (text.system, text.history, text.learns_history) == (system, history, learns)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": MORE, "tools": [{"name": "x"}]}, r"tools: \[\{'name': 'x'\}\] would change what is learned"),
        ({"messages": [ASK, said("assistant", "a", weight=0)]}, r"messages\[1\]: weight: 0 would change"),
        ({"messages": [ASK, said("assistant", "", tool_calls=[{"id": 1}])]}, r"messages\[1\]: tool_calls: .* would change"),
        ({"messages": [ASK, TELL, said("tool", "7"), TELL]}, r"messages\[2\]: role: 'tool' is none of system, user, assistant"),
        ({"messages": [ASK, said("assistant", " \n")]}, r"messages\[1\]: content: an empty assistant turn"),
        ({"messages": [said("user", ""), TELL]}, r"messages\[0\]: content: an empty user turn"),
        ({"messages": [ASK, said("assistant", None)]}, r"messages\[1\]: content: None is not a text"),
        ({"messages": [ASK, said("assistant", [{"type": "image"}])]}, r"messages\[1\]: content: .* is not a text"),
        ({"messages": [ASK, ASK, TELL]}, r"messages\[1\]: a turn of user where the assistant's is expected; join"),
        ({"messages": [TELL]}, r"messages\[0\]: a turn of assistant where the user's is expected"),
        ({"messages": [ASK, said("system", "x"), TELL]}, r"messages\[1\]: a turn of system where the assistant's"),
        ({"messages": [said("system", "x")]}, "messages: a system message alone"),
        ({"messages": [ASK]}, "messages: ends with the user's turn"),
        ({"messages": []}, "has neither"),
        ({"messages": "Fever?"}, "messages: 'Fever[?]' is not a list of messages"),
        ({"messages": ["Fever?"]}, r"messages\[0\]: 'Fever[?]' is not a message"),
        ({"messages": MORE * 100}, "messages: 400 messages, at most 256"),
        ({"messages": MORE, "system": "x"}, "system: beside 'messages'"),
        ({"messages": MORE, "instruction": "x"}, "has 'messages' and 'instruction', keys of two forms"),
        ({"question": "a", "answer": "b", "context": "c"}, "context: 'c' would change"),
        ({"question": "a", "answer": "b", "choices": ["b", "c"]}, "choices: .* would change"),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "history: .* would change"),
        ({"instruction": "a", "output": "b", "completion": "c"}, "has 'prompt'|has 'completion' and 'instruction'"),
        ({"prompt": "a"}, 'needs a "completion"'),
        ({"prompt": "a", "completion": " "}, "completion: an empty answer"),
        ({"prompt": "a", "completion": [TELL]}, "one is a text and one a list of messages"),
        ({"prompt": [ASK], "completion": MORE[1:]}, "completion: has the roles"),
        ({"prompt": MORE[:2], "completion": [TELL]}, "prompt: ends with a turn of assistant"),
        ({"question": "a"}, 'needs a "answer"'),
        ({"question": 3, "answer": "a"}, "question: 3 is not a text"),
        ({"instruction": "a", "output": "b", "system": 3}, "system: 3 is not a text"),
        ({"text": "Once upon a time"}, 'needs a "label"; write the answer there'),
        ({"messages": [ASK, said("assistant", "\ud800")]}, "half a character"),
    ],
)
def test_what_would_be_lost_is_refused_in_one_line(record: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message) as found:
        read(tmp_path, record)
    assert "\n" not in str(found.value)
    assert "training.jsonl:1" in str(found.value)


def test_a_file_has_one_form(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"training\.jsonl:2: a record with 'question', where line 1 has 'messages'; write one form"
    ):
        read(tmp_path, {"messages": MORE}, {"question": "a", "answer": "b"})


def test_a_question_without_an_answer_can_be_asked(tmp_path: Path) -> None:
    bad: list[DataError] = []
    path = write(tmp_path, "training.jsonl", {"messages": MORE[:3]}, {"messages": MORE}) / "training.jsonl"
    first, second = read_records(path, bad, needs_answer=False)
    assert bad == []
    assert (first.instruction, first.history) == (second.instruction, second.history) == ("Rash?", (("Fever?", "Drink."),))


def test_equal_last_questions_of_other_conversations_are_no_duplicates(tmp_path: Path) -> None:
    other = [said("user", "Cough?"), TELL, *MORE[2:]]
    one, two = read(tmp_path, {"messages": MORE}, {"messages": other})
    assert one.prompt != two.prompt


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"instruction": "Rash?", "output": "See a doctor.", "System": "Be kind."}, "'System' is not read; write 'system'"),
        ({"question": "Rash?", "answer": "See a doctor.", "context ": "A child."}, "'context ' is not read; write 'context'"),
        ({"instruction": "Rash?", "output": "See a doctor.", "conversation": MORE}, "conversation: .* would change"),
    ],
)
def test_keys_in_another_spelling_are_not_lost(record: dict[str, Any], message: str, tmp_path: Path) -> None:
    refused(message, read, tmp_path, record)


def test_text_and_label_are_a_form_and_nothing_in_records_of_another(tmp_path: Path) -> None:
    """Alpaca's release on the Hub has a `text` of its own beside instruction and output."""
    write(tmp_path, "training.jsonl", {"text": "Fluid.", "label": "effusion"}, {"text": "Clear.", "label": 1})
    write(tmp_path, "test.jsonl", {"instruction": "Fever?", "output": "Drink.", "text": "Fever? Drink.", "label": 0})
    found = read_texts(tmp_path).splits
    assert [(text.prompt_without_template, text.label) for text in found["training"]] == [
        ("Fluid.", "effusion"),
        ("Clear.", "1"),
    ]
    assert [(text.prompt_without_template, text.outputs) for text in found["test"]] == [("Fever?", ("Drink.",))]


WORSE = said("assistant", "Wait.")


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "Rash?", "chosen": "See a doctor.", "rejected": "Wait."},
        {"prompt": MORE[:3], "chosen": MORE[3:], "rejected": [WORSE]},
        {"chosen": MORE, "rejected": [*MORE[:3], WORSE], "source": "TRL", "score_chosen": 9},
    ],
)
def test_a_preference_has_a_better_and_a_worse_answer_to_one_prompt(record: dict[str, Any], tmp_path: Path) -> None:
    (text,) = read(tmp_path, record)
    assert (text.instruction, text.outputs, text.rejected, text.learns_history) == ("Rash?", ("See a doctor.",), "Wait.", False)
    assert text.history == ((("Fever?", "Drink."),) if isinstance(record["chosen"], list) else ())


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "Rash?", "chosen": "See a doctor."}, "rejected: is missing"),
        (
            {"prompt": "Rash?", "rejected": "Wait.", "chosen": " "},
            "chosen: ' ' holds no answer; write the better answer as chosen",
        ),
        ({"prompt": "Rash?", "chosen": "Wait.", "rejected": "Wait."}, "chosen and rejected are the same answer"),
        ({"prompt": "Rash?", "chosen": MORE[3:], "rejected": [WORSE]}, "prompt and chosen: one is a text and one a list"),
        ({"prompt": MORE[:3], "chosen": MORE[3:], "rejected": "Wait."}, "prompt and rejected: one is a text and one a list"),
        ({"prompt": MORE[:3], "chosen": MORE[2:], "rejected": [WORSE]}, r"chosen: has the roles \['user', 'assistant'\]"),
        ({"chosen": MORE, "rejected": [*MORE[2:3], WORSE]}, "answer different prompts; write the same turns before both"),
        ({"chosen": MORE[:3], "rejected": MORE[:3]}, "chosen: .* holds no answer"),
        ({"chosen": "H: Rash? A: Yes.", "rejected": "H: Rash? A: No."}, 'has neither "instruction" nor "input"'),
        ({"prompt": "Rash?", "completion": "a", "chosen": "b", "rejected": "c"}, "has 'completion' and 'chosen', keys of two"),
        ({"prompt": "Rash?", "Chosen": "b", "completion": "c"}, "'Chosen' is not read; write 'chosen'"),
        ({"prompt": "Rash?", "chosen": "b", "rejected": 5}, "rejected: 5 holds no answer"),
        ({"prompt": "Rash?", "chosen": "b", "rejected": "\ud800"}, "half a character"),
    ],
)
def test_what_is_not_a_preference_is_refused(record: dict[str, Any], message: str, tmp_path: Path) -> None:
    refused(message, read, tmp_path, record)
