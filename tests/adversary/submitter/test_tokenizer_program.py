"""The author of a model folder writes a tokenizer.json that eats a site's memory, or fails for the records that say a word."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from consilium.core.errors import CheckpointError, Reason, UnfitError
from consilium.core.messages import Kind
from consilium.data.datalist import DataList, Loading
from consilium.data.text import Text
from consilium.flare.job import executor, filters, wire
from consilium.models.causal_lm.network import build_causal_lm, load_tokenizer
from consilium.models.untrusted_tokenizer import is_linear
from consilium.tasks.classification.text_samples import TextSamples
from consilium.tasks.language import LanguageConfig
from consilium.tasks.language.task import LanguageTask
from consilium.tasks.language.tokens import Encoder
from tests.models.folders import save_folder

PANIC = {"type": "Split", "pattern": {"Regex": "(?:HIV positive).*(x+x+)+y|(HIV positive)((.*)*)*Q"}, "behavior": "Isolated"}
TIMES_TEN = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}


def chain(kind: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", kind: list(steps)}


def folder_with(tmp_path: Path, place: str, step: Any) -> Path:
    """Return a model folder with one step of its tokenizer.json, or a part of its model, replaced."""
    folder = save_folder(tmp_path / "model")
    path = folder / "tokenizer.json"
    program = json.loads(path.read_text())
    program[place] = program[place] | step if place == "model" else step
    path.write_text(json.dumps(program))
    return folder


LENGTHENING = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": False}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
ATTACKS: dict[str, tuple[str, Any, str]] = {
    "replace": ("normalizer", chain("normalizers", *[TIMES_TEN] * 7), r"normalizers\[1\]: .* 100 characters for one"),
    "backtracking": ("pre_tokenizer", chain("pretokenizers", PANIC, BYTES), r"pretokenizers\[0\]\.pattern\.Regex: '\(\?:HIV"),
    "in a normalizer": ("normalizer", TIMES_TEN | {"pattern": {"Regex": "(x+x+)+y"}}, r"normalizer\.pattern\.Regex: '\(x\+x\+"),
    "in a decoder": ("decoder", TIMES_TEN | {"pattern": {"Regex": "(x+x+)+y"}}, r"decoder\.pattern\.Regex: '\(x\+x\+"),
    "compiling": ("normalizer", TIMES_TEN | {"pattern": {"Regex": "((((a{99}){99}){99}){99})"}}, r"normalizer\.pattern\.Regex"),
    "bytes of bytes": ("pre_tokenizer", chain("pretokenizers", *[BYTES] * 16), r"\[1\]\.type: 'ByteLevel' is there twice"),
    "prefixes": ("pre_tokenizer", chain("pretokenizers", *[LENGTHENING] * 9), r"\[1\]\.type: 'Metaspace' is there twice"),
    "many steps": ("normalizer", chain("normalizers", *[{"type": "NFC"}] * 99), r"normalizer: 99 steps, at most 64"),
    "deep": ("normalizer", chain("normalizers", chain("normalizers", *[TIMES_TEN] * 2)), r"\[1\]: .* 100 characters"),
    "ligature": ("normalizer", TIMES_TEN | {"content": "\ufdfa"}, r"normalizer\.content: .* lengthened again by Unicode"),
    "empty": ("normalizer", TIMES_TEN | {"pattern": {"String": ""}}, r"normalizer\.pattern: .* is not a text or pattern"),
    "long prefix": ("normalizer", {"type": "Prepend", "prepend": "a" * 9999}, r"normalizer\.prepend: .* over 256 characters"),
    "charsmap": ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAA" + "Y" * 90}, r"charsmap: "),
    "unlisted": ("pre_tokenizer", {"type": "Delimiter"}, r"pre_tokenizer\.type: 'Delimiter' is none of BertPreTokenizer, "),
    "strip": ("decoder", {"type": "Strip", "content": " ", "start": 0, "stop": 99}, r"decoder\.stop: 99, only 0 is possible"),
    "dropout": ("model", {"dropout": 0.5}, r"model\.dropout: 0\.5 draws tokens anew for every text"),
    "long words": ("model", {"max_input_chars_per_word": 10**9}, r"model\.max_input_chars_per_word: 1000000000, at most 200"),
    "suffix": ("model", {"end_of_word_suffix": "a" * 9999}, r"end_of_word_suffix: .* not a text of at most 256 characters"),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_tokenizer_without_bounds_is_refused_before_it_is_made(attack: str, tmp_path: Path) -> None:
    """Claim: the file, the key, the value and the remedy in one line; no step of it has run."""
    place, step, told = ATTACKS[attack]
    with pytest.raises(
        CheckpointError, match=rf"tokenizer\.json: .*{told}.*; use the tokenizer that the model's publisher ships"
    ):
        load_tokenizer("folder", folder_with(tmp_path, place, step))


CASES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
MARKS = r"[^\s\p{L}\p{N}]"
LEAD, BLANKS = r"[^\r\n\p{L}\p{N}]?", r"\s*[\r\n]+|\s+(?!\S)|\s+"
PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
PATTERNS = {
    "GPT-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "Llama 3": rf"{CASES}|{LEAD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{BLANKS}",
    "Qwen 2": rf"{CASES}|{LEAD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{BLANKS}",
    "Qwen 3.5": rf"{CASES}|{LEAD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{BLANKS}",
    "GPT-4o": rf"{LEAD}{UPPER}*{LOWER}+{CASES}?|{LEAD}{UPPER}+{LOWER}*{CASES}?|\p{{N}}{{1,3}}| ?{MARKS}+[\r\n/]*|{BLANKS}",
    "Tekken": rf"{LEAD}{UPPER}*{LOWER}+|{LEAD}{UPPER}+{LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{BLANKS}",
    "GPT-4": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "DeepSeek V3": rf"{PUNCTUATION}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{BLANKS}",
    "DeepSeek": "\\s?[!-/:-~！-／：-～‘-‟　-。]+",
    "Chinese and Japanese": "[一-龥぀-ゟ゠-ヿ]+",
    "BLOOM": " ?[^(\\s|[.,!?…。，、।۔،])]+",
    "Falcon": "[0-9][0-9][0-9]",
    "CLIP": r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    "Command": r"\d{1,3}(?=(?:\d{3})*\b)",
    "Gemma 4": "[^\\n]+|[\\n]+",
    "mT5": " {2,}",
    "BARThez": r"\s{2,}|[\n\r\t]",
    "SeamlessM4T": " +▁",
}


@pytest.mark.parametrize("name", PATTERNS)
def test_published_patterns_pass(name: str) -> None:
    Regex(PATTERNS[name])  # Oniguruma takes it
    assert is_linear(PATTERNS[name])


SLOW = [
    "(x+x+)+y", "(.*.*.*)*X", "[^Q]*Q", "a*b", r"\s*Q", "(a|a)*", "(a?){30}b", "a?" * 30 + "a" * 30, "x{0,500}x{0,500}y",
    "x{1,3}+y", "((((a{100}){100}){100}){100})", "(?=.*)a", r"(a)\1+b", "(?:a|ab)(?:c|bcd)*x", "[^a]+[^b]+[^c]+d", "^.*$",
    r"\X*", "(?>a*)b", "[]a*]b*c", "(?i)a*b", "a{2}{3}{400}", r"[^\]*b", "(?<n>a|b\\g<n>c)", "a**", "(a", "a)", "[a", "",
    "a{1,0}" + "a?" * 30 + "a" * 30, "[^]", "a{0,500}",
]  # fmt: skip


@pytest.mark.parametrize("pattern", SLOW)
def test_a_pattern_that_steps_back_does_not_pass(pattern: str, tmp_path: Path) -> None:
    step = TIMES_TEN | {"pattern": {"Regex": pattern}}
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: normalizer\.pattern"):
        load_tokenizer("folder", folder_with(tmp_path, "normalizer", step))


CORPUS = ["the patient has no fever today, 37.5 C", "HIV negative; troponin 12 ng/L", "l'état du patient était bon"] * 9
SPECIAL = ["<unk>", "<s>", "</s>", "[UNK]", "[CLS]", "[SEP]"]


def _begun(token: str, number: int) -> processors.PostProcessor:
    return processors.TemplateProcessing(single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, number)])


def _byte_level(pattern: str = "", normalizer: Any = None, post: Any = None) -> Tokenizer:
    found = Tokenizer(models.BPE())
    split = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    found.pre_tokenizer = pre_tokenizers.Sequence([*split, pre_tokenizers.ByteLevel(False, use_regex=not pattern)])
    found.normalizer, found.decoder = normalizer, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    found.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    )
    found.post_processor = post or processors.ByteLevel()
    return found


def _sentencepiece() -> Tokenizer:
    found = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    found.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    found.decoder = decoders.Sequence(parts)
    found.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=120, special_tokens=SPECIAL, show_progress=False))
    found.post_processor = _begun("<s>", 1)
    return found


def _wordpiece() -> Tokenizer:
    found = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    found.normalizer, found.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    found.decoder = decoders.WordPiece()
    found.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=120, special_tokens=SPECIAL, show_progress=False))
    found.post_processor = _begun("[CLS]", 4)
    return found


def _unigram() -> Tokenizer:
    found = Tokenizer(models.Unigram())
    steps = [normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    found.normalizer = normalizers.Sequence(steps)
    found.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    found.decoder = decoders.Metaspace()
    found.train_from_iterator(
        CORPUS, trainers.UnigramTrainer(vocab_size=120, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    )
    found.post_processor = processors.TemplateProcessing(single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 2)])
    return found


FAMILIES = {
    "GPT2Tokenizer": lambda: _byte_level(),
    "PreTrainedTokenizerFast": lambda: _byte_level(
        PATTERNS["Llama 3"], post=processors.Sequence([processors.ByteLevel(), _begun("<s>", 1)])
    ),
    "Qwen2TokenizerFast": lambda: _byte_level(PATTERNS["Qwen 2"], normalizers.NFC()),
    "LlamaTokenizer": _sentencepiece,
    "BertTokenizerFast": _wordpiece,
    "T5TokenizerFast": _unigram,
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_tokenizer_of_a_published_kind_writes_what_transformers_writes(kind: str, tmp_path: Path) -> None:
    FAMILIES[kind]().save(str(tmp_path / "tokenizer.json"))
    end = {"content": "</s>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    said = {"tokenizer_class": kind, "eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>", "model_max_length": 1e30}
    notes = {
        "name_or_path": "org/name",
        "special_tokens_map_file": "/root/.cache/x",
        "processor_class": "X",
        "tokenizer_file": None,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said | notes | {"added_tokens_decoder": {"2": end}}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": False}))
    found, wanted = load_tokenizer("folder", tmp_path), AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert type(found) is type(wanted)
    for text in (*CORPUS[:3], "  two\n\nlines  ﷺ Ω", ""):
        ids = wanted(text).input_ids
        assert found(text).input_ids == ids
        assert found.decode(ids) == wanted.decode(ids)


class Panic(BaseException):
    """As pyo3's PanicException, which a search over Oniguruma's limit raises in Python; it is no Exception."""


class Panicking:
    """A tokenizer that fails for the records that say one thing, as no check has foreseen."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, **options: Any) -> Any:
        if "HIV positive" in text:
            raise Panic("called `Result::unwrap()` on an `Err` value: retry-limit-in-match over HIV positive")
        return self._tokenizer(text, **options)


def record(words: str) -> Text:
    return Text(f"case-{len(words)}", words, "", ("a fever",))


def test_a_tokenizer_s_panic_is_an_error_without_the_record_s_words() -> None:
    encoder = Encoder(Panicking(load_tokenizer("tiny", None)), 64)  # type: ignore[arg-type]
    encoder.encode_record(record("the patient is HIV negative"))
    with pytest.raises(CheckpointError, match=r"its tokenizer fails for a text \(Panic\); use the tokenizer that") as error:
        encoder.encode_record(record("the patient is HIV positive"))
    assert "HIV" not in str(error.value)


class PanickingNormalizer:
    """A tokenizer's normalizer that fails for the records that say one thing."""

    def normalize_str(self, words: str) -> str:
        if "HIV positive" in words:
            raise Panic("HIV positive")
        return words


def test_a_normalizer_s_panic_is_an_error_without_the_record_s_words() -> None:
    tokenizer = Panicking(load_tokenizer("tiny", None))
    vars(tokenizer)["backend_tokenizer"] = SimpleNamespace(normalizer=PanickingNormalizer())
    with pytest.raises(CheckpointError, match=r"its tokenizer fails for a text \(Panic\)") as error:
        Encoder(tokenizer, 64).option("HIV positive")  # type: ignore[arg-type]
    assert "HIV" not in str(error.value)


@pytest.mark.parametrize("quiet", [True, False])
def test_a_private_job_does_not_stop_where_a_record_makes_the_tokenizer_fail(quiet: bool) -> None:
    """Claim: in a quiet list such a record is an empty one; else a site's silence would tell who has it."""
    texts = (record("the patient is HIV positive"), record("the patient is HIV negative"))
    data = DataList(Path("list.json"), {"training": texts, "validation": (), "test": ()}, loading=Loading(ignore_unfit=quiet))
    tokenizer: Any = Panicking(load_tokenizer("tiny", None))
    if not quiet:
        with pytest.raises(UnfitError, match=r"case-27: model\.checkpoint: its tokenizer fails") as error:
            LanguageTask(data, tokenizer, 64, LanguageConfig(name="language"))
        assert "HIV" not in str(error.value)
        return
    task = LanguageTask(data, tokenizer, 64, LanguageConfig(name="language"))
    empty, whole = task.data.splits["training"]
    assert (empty.instruction, empty.outputs, whole) == ("", ("",), texts[1])


def test_a_private_job_does_not_stop_where_a_prompt_fails_only_when_it_is_shortened() -> None:
    """Claim: such a record is asked as an empty one. The parts of a prompt are tokenized apart when it is shortened."""

    class FailsAtTheStart(Panicking):
        def __call__(self, text: str, **options: Any) -> Any:
            if text.startswith("HIV positive"):
                raise Panic("HIV positive")
            return self._tokenizer(text, **options)

    tiny = load_tokenizer("tiny", None)
    shape = {"model_type": "gpt2", "n_positions": 64, "n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": len(tiny)}
    model = build_causal_lm("folder", None, shape, weights=False)
    texts = tuple(Text("case", "Of which ward?", said, ("a fever",)) for said in ("HIV positive since May", "HIV negative"))
    form: dict[str, Any] = {"prompt": "{instruction}\\n{input}\nAnswer:", "evaluate": "generation"}
    config = LanguageConfig(name="language", max_new_tokens=56, **form)
    splits = {"training": (), "validation": (), "test": texts}
    task = LanguageTask(DataList(Path("list.json"), splits, Loading(ignore_unfit=True)), FailsAtTheStart(tiny), 64, config)  # type: ignore[arg-type]
    assert len(task.predict(model, "test", 1)) == 2
    with pytest.raises(UnfitError, match="tokenizer fails"):
        LanguageTask(DataList(Path("list.json"), splits), FailsAtTheStart(tiny), 64, config).predict(model, "test", 1)  # type: ignore[arg-type]


def test_a_tokenizer_that_fails_for_an_empty_record_fails_at_every_site() -> None:
    """Claim: also at a site without unfit records; else failing for some words and for none would tell who has them."""

    class FailsForNothing(Panicking):
        def __call__(self, text: str, **options: Any) -> Any:
            if "###" in text and "fever" not in text:
                raise Panic("empty")
            return self._tokenizer(text, **options)

    splits = {"training": (record("a fever"),), "validation": (), "test": ()}
    data = DataList(Path("list.json"), splits, Loading(ignore_unfit=True))
    with pytest.raises(CheckpointError, match="tokenizer fails"):
        LanguageTask(data, FailsForNothing(load_tokenizer("tiny", None)), 64, LanguageConfig(name="language"))  # type: ignore[arg-type]

    class FailsForABlank(Panicking):
        def __call__(self, text: str, **options: Any) -> Any:
            if not text.strip():
                raise Panic("blank")
            return self._tokenizer(text, **options)

    with pytest.raises(CheckpointError, match="tokenizer fails"):
        TextSamples(data, FailsForABlank(load_tokenizer("tiny", None)), 64)


def test_no_failure_at_a_site_passes_the_executor_and_the_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: what is not an Exception is a refusal too, of which a word leaves; what ends a process ends it."""
    task = object.__new__(executor.AuthorizedTask)
    object.__setattr__(task, "kind", Kind.TRAIN)
    object.__setattr__(task, "answered", False)
    monkeypatch.setattr(executor, "log_failure", lambda *_: None)
    monkeypatch.setattr(filters, "log_failure", lambda *_: None)

    class Failing(filters.ClosedFilter):
        def handle(self, shareable: Any, fl_ctx: Any) -> Any:
            raise raised

    for raised, passes in ((Panic("HIV positive"), False), (ValueError("x"), False), (SystemExit(1), True)):
        site = executor.SiteExecutor()

        def fail(*_: Any, error: BaseException = raised) -> Any:
            raise error

        monkeypatch.setattr(site, "_prepared_site", fail)
        for act in (
            lambda site=site: site.execute("train", wire.put(task), None, None),
            lambda: Failing().process(wire.refusal(Reason.TASK), None),
        ):
            if passes:
                with pytest.raises(SystemExit):
                    act()
            else:
                assert wire.reason_of(act()) is Reason.ERROR
