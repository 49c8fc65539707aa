"""Scores of written answers against one or more references each: ROUGE-L, BLEU, METEOR, NIST and CIDEr-D.

ROUGE-L by rouge-score, BLEU by sacrebleu (its own tokenization, scaled to 0..1), METEOR and NIST by nltk. METEOR matches exact
words and stems only: its synonyms need WordNet's data, which nothing here downloads, so it lies below published values.
CIDEr-D is our own, equal to the COCO caption evaluation's on equal words. METEOR, NIST and CIDEr-D split lower-case text at
words and punctuation. ROUGE-L drops punctuation; of ASCII texts its words are rouge-score's own, which knows no other letters.

No score knows where a word ends in a script without spaces (Chinese, Japanese, Thai): all up to the next mark is one word.
"""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any

NAMES = ("rouge_l", "bleu", "meteor", "nist", "cider")
Grams = Counter[tuple[str, ...]]


class _NoSynonyms:
    """In WordNet's place: knows no word."""

    def synsets(self, word: str) -> list[str]:
        """Return no synonym of any word."""
        return []


def of_records(written: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, list[float]]:
    """Return ROUGE-L (F) and METEOR, 0..1, of each of N written answers with the best of its references.

    A split's score is their mean.
    """
    return {"rouge_l": rouge_l(written, references), "meteor": meteor(written, references)}


def of_corpus(written: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return BLEU, 0..1, NIST (up to 5-grams) and CIDEr of N written answers as one corpus."""
    return {"bleu": bleu(written, references), "nist": nist(written, references), "cider": cider(written, references)}


def rouge_l(written: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
    """Return each answer's F-measure of the longest common subsequence with its best reference, words stemmed."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"], tokenizer=_Stems())
    return [scorer.score_multi(list(refs), one)["rougeL"].fmeasure for one, refs in zip(written, references, strict=True)]


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
        found = "".join(c if _spells(c) else " " for c in unicodedata.normalize("NFC", text.lower())).split()
        return [self._porter.stem(one) if len(one) > 3 and one.isascii() else one for one in found]


def _spells(character: str) -> bool:
    return character.isalpha() or character.isdecimal() or unicodedata.category(character).startswith("M")


def bleu(written: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Return corpus BLEU-4 in 0..1; answers may have different numbers of references."""
    from sacrebleu import corpus_bleu

    most = max(len(refs) for refs in references)
    streams = [[refs[i] if i < len(refs) else None for refs in references] for i in range(most)]
    return corpus_bleu(list(written), streams).score / 100


def meteor(written: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
    """Return each answer's METEOR with its best reference, by exact words and stems."""
    from nltk.translate.meteor_score import meteor_score

    pairs = zip(written, references, strict=True)
    return [meteor_score([words(ref) for ref in refs], words(one), wordnet=_NoSynonyms()) for one, refs in pairs]


def nist(written: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Return corpus NIST with n-grams up to 5, fewer where all answers are shorter; 0 where all are empty."""
    from nltk.translate.nist_score import corpus_nist

    tokens = [words(one) for one in written]
    longest = max(len(one) for one in tokens)
    if not longest:
        return 0.0
    return float(corpus_nist([[words(ref) for ref in refs] for refs in references], tokens, n=min(5, longest)))


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
    """Return a text's lower-case words and punctuation marks."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


def _grams(tokens: Sequence[str], n: int) -> Grams:
    return Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


def _weigh(grams: Grams, documents: Counter[tuple[str, ...]], count: int) -> dict[tuple[str, ...], float]:
    return {g: c * math.log(count / max(1, documents[g])) for g, c in grams.items()}


def _clipped_cosine(own: dict[tuple[str, ...], float], true: dict[tuple[str, ...], float]) -> float:
    norms = math.hypot(*own.values()) * math.hypot(*true.values())
    return sum(min(value, true[gram]) * true[gram] for gram, value in own.items() if gram in true) / norms if norms else 0.0
