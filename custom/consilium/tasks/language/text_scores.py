"""Scores of written answers against one or more references each: ROUGE-L, BLEU, METEOR, NIST and CIDEr-D.

ROUGE-L as rouge-score has it, BLEU by sacrebleu (its own tokenization, scaled to 0..1), METEOR by nltk. METEOR matches exact
words and stems only: its synonyms need WordNet's data, which nothing here downloads, so it lies below published values. NIST
and CIDEr-D are our own: NIST is mteval-v13a's, as E2E's evaluation has it, CIDEr-D on equal words the COCO caption
evaluation's. BLEU and NIST split words as mteval-v13a does, METEOR and CIDEr-D lower-case text at words and punctuation.
ROUGE-L drops punctuation; of ASCII texts its words are rouge-score's own, which knows no other letters. A letter and its mark
are the same as both in one.

Scripts without spaces (Chinese, Japanese, Thai) are not segmented: all text up to the next mark is one word.
"""

import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property, reduce
from operator import or_
from typing import Any

from consilium.tasks.language.answers import MOST

NAMES = ("rouge_l", "bleu", "meteor", "nist", "cider")
Grams = Counter[tuple[str, ...]]


class _NoSynonyms:
    """An empty WordNet."""

    def synsets(self, word: str) -> list[str]:
        """Return no synonym of any word."""
        return []


def of_records(written: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, list[float]]:
    """Return ROUGE-L (F) and METEOR, 0..1, of each of N written answers with the best of its references.

    A split's score is their mean. Of longer texts the first MOST characters are compared.
    """
    written, references = _cut(written, references)
    return {"rouge_l": rouge_l(written, references), "meteor": meteor(written, references)}


def of_corpus(written: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return BLEU, 0..1, NIST (up to 5-grams) and CIDEr of N written answers as one corpus; texts as for `of_records`."""
    written, references = _cut(written, references)
    return {"bleu": bleu(written, references), "nist": nist(written, references), "cider": cider(written, references)}


def _cut(written: Sequence[str], references: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    return [one[:MOST] for one in written], [[one[:MOST] for one in refs] for refs in references]


def rouge_l(written: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
    """Return each answer's F-measure of the longest common subsequence with its best reference, words stemmed."""
    from rouge_score.scoring import fmeasure

    split, found = _Stems().tokenize, []
    for one, refs in zip(written, references, strict=True):
        own, scores = split(one), [0.0]
        for true in filter(None, map(split, refs if own else ())):
            common = _longest_common(own, true)
            scores.append(fmeasure(common / len(own), common / len(true)))
        found.append(max(scores))
    return found


def _longest_common(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the length of the longest common subsequence (Hyyrö, "Bit-Parallel LCS-length Computation Revisited", 2004).

    rouge-score's own table has a Python number for each pair of words: 20 s for 256 words beside 20,000.
    """
    places: dict[str, int] = {}
    for place, word in enumerate(other):
        places[word] = places.get(word, 0) | 1 << place
    whole = (1 << len(other)) - 1
    left = whole
    for word in one:
        match = left & places.get(word, 0)
        left = (left + match | left - match) & whole
    return len(other) - left.bit_count()


class _Stems:
    """In the place of rouge-score's tokenizer, which drops all but a to z and digits: no answer in Cyrillic would score.

    Letters, marks on them and digits of every script make words. English ones of over three letters are stemmed, as there.
    """

    @cached_property
    def _porter(self) -> Any:
        from nltk.stem.porter import PorterStemmer

        return PorterStemmer()

    def tokenize(self, text: str) -> list[str]:
        """Return a text's lower-case stems."""
        found = "".join(c if _spells(c) else " " for c in _composed(text.lower())).split()
        return [self._porter.stem(one) if len(one) > 3 and one.isascii() else one for one in found]


def _spells(character: str) -> bool:
    return character.isalpha() or character.isdecimal() or unicodedata.category(character).startswith("M")


def _composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def bleu(written: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Return corpus BLEU-4 in 0..1; answers may have different numbers of references."""
    from sacrebleu import corpus_bleu

    most = max(len(refs) for refs in references)
    streams = [[_composed(refs[i]) if i < len(refs) else None for refs in references] for i in range(most)]
    return corpus_bleu([_composed(one) for one in written], streams).score / 100


def meteor(written: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
    """Return each answer's METEOR with its best reference, by exact words and stems."""
    from nltk.translate.meteor_score import meteor_score

    pairs = zip(written, references, strict=True)
    return [meteor_score([words(ref) for ref in refs], words(one), wordnet=_NoSynonyms()) for one, refs in pairs]


def nist(written: Sequence[str], references: Sequence[Sequence[str]], longest: int = 5) -> float:
    """Return corpus NIST (Doddington, HLT 2002) as mteval-v13a; references may vary in number, as in E2E's evaluation.

    An n-gram tells log2(how often its first n - 1 words are said / how often it is itself), over all references. For n = 1 ..
    `longest`, what the answers' n-grams tell is added up, each as often as the reference with most of them has it, and divided
    by how many there are. Answers that are shorter than their references' mean lose. 0 where nothing is written.
    """
    split = _mteval()
    own, known = [split(one) for one in written], [[split(ref) for ref in refs] for refs in references]
    times: Grams = Counter()
    for ref in (ref for refs in known for ref in refs):
        times.update({(): len(ref)})
        times.update(gram for n in range(1, longest + 1) for gram in _grams(ref, n).elements())
    total = 0.0
    for n in range(1, longest + 1):
        found = [_grams(one, n) & reduce(or_, (_grams(ref, n) for ref in refs)) for one, refs in zip(own, known, strict=True)]
        told = sum(count * math.log2(times[gram[:-1]] / times[gram]) for grams in found for gram, count in grams.items())
        total += told / max(1, sum(max(0, len(one) - n + 1) for one in own))
    return total * _brevity(sum(map(len, own)), sum(sum(map(len, refs)) / len(refs) for refs in known))


def _brevity(written: int, expected: float) -> float:
    """Return NIST's brevity factor: 1/2 for answers with two thirds of the words of their references."""
    if not written or written >= expected:
        return float(written > 0)
    return float(0.5 ** ((math.log(written / expected) / math.log(1.5)) ** 2))


def _mteval() -> Callable[[str], list[str]]:
    """Return the tokenizer of mteval-v13a, in lower case."""
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    split = Tokenizer13a()
    return lambda text: str(split(_composed(text.lower()))).split()


def cider(written: Sequence[str], references: Sequence[Sequence[str]], longest: int = 4) -> float:
    """Return CIDEr-D (Vedantam et al., CVPR 2015) as the COCO caption evaluation computes it, 0..10, of words not stemmed.

    For n = 1 .. `longest`, an answer and a reference are vectors of n-gram counts times log(N / documents with the n-gram), a
    document being all references of one answer. Their cosine, with an answer's entries clipped to the reference's, falls with
    the difference of lengths (counted in pairs of words, as there) and is averaged over references, n and answers, times 10.
    With one answer alone every weight is log 1 = 0, and so is the score.
    """
    total = 0.0
    for n in range(1, longest + 1):
        counted = [[_grams(words(ref), n) for ref in refs] for refs in references]
        documents = Counter(gram for refs in counted for gram in set().union(*refs))
        for one, texts, refs in zip(written, references, counted, strict=True):
            vector = _weigh(_grams(words(one), n), documents, len(written))
            close = [_clipped_cosine(vector, _weigh(ref, documents, len(written))) for ref in refs]
            total += sum(c * _penalty(one, text) for c, text in zip(close, texts, strict=True)) / len(refs)
    return 10 * total / longest / len(written)


def _penalty(one: str, other: str) -> float:
    pairs = [max(len(words(text)) - 1, 0) for text in (one, other)]
    return math.exp(-((pairs[0] - pairs[1]) ** 2) / (2 * 6.0**2))


def words(text: str) -> list[str]:
    """Return a text's lower-case words and punctuation marks. Letters, marks on them, numbers and _ make words."""
    inside = (c if c.isalnum() or c == "_" or _spells(c) else f" {c} " for c in _composed(text.lower()))
    return "".join(inside).split()


def _grams(tokens: Sequence[str], n: int) -> Grams:
    return Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


def _weigh(grams: Grams, documents: Counter[tuple[str, ...]], count: int) -> dict[tuple[str, ...], float]:
    return {g: c * math.log(count / max(1, documents[g])) for g, c in grams.items()}


def _clipped_cosine(own: dict[tuple[str, ...], float], true: dict[tuple[str, ...], float]) -> float:
    norms = math.hypot(*own.values()) * math.hypot(*true.values())
    return sum(min(value, true[gram]) * true[gram] for gram, value in own.items() if gram in true) / norms if norms else 0.0
