"""The forms of text records on the Hugging Face Hub and in TRL, and their conversion into one, `Chat`; text.py uses it.

Alpaca:      {"instruction": ..., "input": ..., "output": ..., "system": ...}
messages:    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}, or "conversations"
completion:  {"prompt": ..., "completion": ...}, both texts or both lists of messages
question:    {"question": ..., "answer": ...}
chosen:      {"prompt": ..., "chosen": ..., "rejected": ...}, all texts or all lists of messages, which may hold the prompt
text:        {"text": ..., "label": ...}, the label a name or a number; in a record of another form, these two keys are ignored
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from consilium.core.errors import DataError

FORMS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt": ("prompt", "completion"),
    "question": ("question", "answer"),
    "instruction": ("instruction", "input", "output", "outputs"),
    "chosen": ("chosen", "rejected"),
    "text": ("text", "label"),
}
"""The keys of each form, by the form's name."""
MEANINGS = frozenset(
    {
        "answers", "audio", "audios", "chat_template", "chat_template_kwargs", "choices", "context", "contexts",
        "conversation", "document", "documents", "function_call", "functions", "history", "images", "options", "query",
        "reasoning", "reasoning_content", "response", "responses", "suffix", "system_prompt", "target", "targets", "thinking",
        "tool_calls", "tools", "video", "videos", "weight",
    }
)  # fmt: skip
"""Keys of no form here that would change the question of a record or the words that are learned. They are refused."""
KEYS = MEANINGS | {"system", *(key for name, keys in FORMS.items() for key in keys if name != "text")}
"""All keys with a meaning, in the spelling that is read."""
ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant", "developer": "system"}
"""ShareGPT's and OpenAI's names of roles."""
MOST_TURNS = 256
EXAMPLE = '{"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}'


@dataclass(frozen=True)
class Chat:
    """A record of any form: a question and its context, the earlier (question, answer) pairs, and the answer.

    `form`: a key of FORMS. `learns_history`: whether answers of earlier pairs are learned. `answer`: None if the record has no
    answer, and for an Alpaca record, whose answers text.py reads. `rejected`: the worse answer of a preference record, else
    None.
    """

    form: str
    instruction: Any
    input: Any = ""
    answer: Any = None
    system: Any = ""
    history: tuple[tuple[str, str], ...] = ()
    learns_history: bool = True
    rejected: str | None = None


def chat_of(where: str, raw: Mapping[str, Any]) -> Chat | None:
    """Return a record as a Chat, None if it has no key of any form. Raises DataError with `where` and the key."""
    present = {key for key, value in raw.items() if value not in ("", [], {}, None)}
    own = present - {"prompt"} if present.intersection(FORMS["chosen"]) else present
    forms = [name for name, keys in FORMS.items() if own.intersection(keys)]
    if len(forms) > 1 and "text" in forms:
        forms.remove("text")
    if len(forms) > 1:
        pair = " and ".join(repr(next(key for key in FORMS[name] if key in own)) for name in forms[:2])
        raise DataError(f"{where}: has {pair}, keys of two forms; leave one of them out")
    if forms and (bad := sorted(key for key in present - KEYS if key.strip().lower() in KEYS)):
        raise DataError(f"{where}: {bad[0][:80]!r} is not read; write {bad[0].strip().lower()!r}, or leave it out")
    if bad := sorted(MEANINGS & present):
        raise DataError(
            f"{where}: {bad[0]}: {repr(raw[bad[0]])[:80]} would change what is learned and is not read; "
            "put its words into the question or the answer, or leave the key out"
        )
    if not forms:
        return None
    form, system = forms[0], raw.get("system", "")
    if form in ("messages", "conversations"):
        if "system" in present:
            raise DataError(f"{where}: system: beside {form!r}; write it there as the first message, of role system")
        return _chat_from_messages(where, form, _read_messages(where, form, raw[form]))
    if form == "chosen":
        return _chat_from_preference(where, raw, system)
    if form == "prompt":
        return _chat_from_completion(where, raw, system, "completion")
    if form == "question":
        return Chat(form, raw.get("question", ""), answer=raw.get("answer"), system=system)
    if form == "text":
        label = raw.get("label")
        return Chat(form, raw.get("text", ""), answer=str(label) if type(label) is int else label, system=system)
    return Chat(form, raw.get("instruction", ""), raw.get("input", ""), system=system)


def _chat_from_preference(where: str, raw: Mapping[str, Any], system: Any) -> Chat:
    """Return a Chat with the better answer in `answer` and the worse in `rejected`.

    Raises DataError if these answer different prompts.
    """
    both = list[Chat]()
    for key in FORMS["chosen"]:
        if "prompt" in raw or not isinstance(raw.get(key), list):
            found = _chat_from_completion(where, {"prompt": "", **raw}, system, key)
        else:
            found = replace(_chat_from_messages(where, key, _read_messages(where, key, raw[key])), form="prompt")
        if not isinstance(found.answer, str) or not found.answer.strip():
            what = "is missing" if raw.get(key) is None else f"{repr(raw[key])[:80]} holds no answer"
            raise DataError(f"{where}: {key}: {what}; write the better answer as chosen, the worse one as rejected")
        both.append(found)
    better, worse = both
    if replace(better, answer=None) != replace(worse, answer=None):
        raise DataError(f"{where}: chosen and rejected answer different prompts; write the same turns before both answers")
    if better.answer == worse.answer:
        raise DataError(f"{where}: chosen and rejected are the same answer; leave the record out")
    return replace(better, form="chosen", learns_history=False, rejected=worse.answer)


def _chat_from_completion(where: str, raw: Mapping[str, Any], system: Any, key: str) -> Chat:
    """Return a record whose prompt is in "prompt" and whose answer is in `key`. Raises DataError."""
    prompt, completion = raw.get("prompt", ""), raw.get(key)
    if not isinstance(prompt, list) and not isinstance(completion, list):
        return Chat("prompt", prompt, answer=completion, system=system)
    if not isinstance(prompt, list) or not isinstance(completion, list | None):
        raise DataError(f"{where}: prompt and {key}: one is a text and one a list of messages; write both alike")
    if system:
        raise DataError(f"{where}: system: beside a list of messages; write it as the first message of prompt, of role system")
    asked = _read_messages(where, "prompt", prompt)
    if not asked or asked[-1][0] != "user":
        raise DataError(f"{where}: prompt: ends with a turn of {asked[-1][0] if asked else 'nobody'}; end it with the user's")
    answer = [] if completion is None else _read_messages(where, key, completion)
    if completion is not None and [role for role, _ in answer] != ["assistant"]:
        raise DataError(
            f"{where}: {key}: has the roles {[role for role, _ in answer]}; write one assistant message, and earlier ones "
            "into prompt"
        )
    return replace(_chat_from_messages(where, "prompt", [*asked, *answer]), learns_history=False)


def _read_messages(where: str, key: str, value: Any) -> list[tuple[str, str]]:
    """Return the (role, text) of each message in a list. Raises DataError."""
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: {key}: {repr(value)[:80]} is not a list of messages; write {EXAMPLE}")
    if len(value) > MOST_TURNS:
        raise DataError(f"{where}: {key}: {len(value):,} messages, at most {MOST_TURNS} are possible; split the conversation")
    found = []
    for number, one in enumerate(value):
        place = f"{where}: {key}[{number}]"
        if not isinstance(one, dict):
            raise DataError(f'{place}: {repr(one)[:80]} is not a message; write {{"role": "user", "content": ...}}')
        names = ("from", "value") if "from" in one and "role" not in one else ("role", "content")  # ShareGPT's or OpenAI's
        for name, entry in one.items():
            if name not in names and entry not in (None, "", [], {}):
                raise DataError(
                    f"{place}: {str(name)[:40]}: {repr(entry)[:60]} would change what is learned and is not read; "
                    f"put its words into {names[1]}, or leave the key out"
                )
        role = one.get(names[0])
        role = ROLES.get(role, role) if isinstance(role, str) else role
        if role not in ("system", "user", "assistant"):
            raise DataError(f"{place}: {names[0]}: {repr(role)[:40]} is none of system, user, assistant; write one of them")
        text = one.get(names[1])  # vision-language records have a list of parts; it may hold texts only
        if isinstance(text, list) and text and all(isinstance(part, dict) and part.get("type") == "text" for part in text):
            text = "".join(part["text"] if isinstance(part.get("text"), str) else "" for part in text)
        if not isinstance(text, str):
            raise DataError(f"{place}: {names[1]}: {repr(text)[:80]} is not a text; write it in quotes")
        if role != "system" and not text.strip():
            raise DataError(f"{place}: {names[1]}: an empty {role} turn; write its words, or leave the conversation out")
        found.append((role, text))
    return found


def _chat_from_messages(where: str, form: str, messages: Sequence[tuple[str, str]]) -> Chat:
    """Return a conversation as a Chat. After an optional system message, user and assistant take turns.

    The last answer may be missing. Raises DataError for another order.
    """
    system = messages[0][1] if messages[0][0] == "system" else ""
    turns = messages[1:] if messages[0][0] == "system" else messages
    for number, (role, _) in enumerate(turns):
        if role != ("user", "assistant")[number % 2]:
            at = number + len(messages) - len(turns)
            raise DataError(
                f"{where}: {form}[{at}]: a turn of {role} where the {('user', 'assistant')[number % 2]}'s is expected; "
                "join turns that follow each other, and begin with the user's after at most one system message"
            )
    if not turns:
        raise DataError(f"{where}: {form}: a system message alone; write {EXAMPLE}")
    words = [content for _, content in turns]
    asked = words if len(words) % 2 else words[:-1]
    answer = None if len(words) % 2 else words[-1]
    return Chat(form, asked[-1], answer=answer, system=system, history=tuple(zip(asked[:-1:2], asked[1:-1:2], strict=True)))
