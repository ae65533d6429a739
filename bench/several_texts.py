"""False loss of two models of the same few texts, through published tokenizers.

    python -m bench.several_texts --pairs tekken:v3,student.json:teacher.json
    python -m bench.several_texts --texts 'Staat|Stadt|Straße'
    python -m bench.several_texts --random 20 --seed 1

Student and teacher give the same probability to each of a few texts, which differ in one place:
``x = repr(a)``, ``x = str(a)``, ``x = len(a)``. Each text is a completion, and every other one is
likely, too: a divergence should be zero, although the two tokenizers divide what was not sampled
at other places. ``bench.equal_belief`` has one text only, of which every token is realised.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from statistics import mean

from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer

from bench.byte_models import false_loss
from bench.named_tokenizers import PAIRS, pairs_of, short_names, tokenizer_of
from bench.random_texts import RandomTexts, words_of
from tests.losses.prefix_pairs import Pair, Tongue

#: Kind -> texts.
TEXTS = {
    "calls": ("x = repr(a)", "x = str(a)", "x = len(a)"),
    "names": (" OSError", " ValueError", " KeyError"),
    "numbers": tuple(f"The total is {n} items." for n in (5, 57, 573, 12, 1234, 12345, 901, 9)),
    "dates": ("January 17, 2024", "March 3, 1998", "December 25, 2010", "May 1, 2001"),
    "code": ("    return None\n", "    raise ValueError()\n", "        pass\n"),
    "words": ("The committee sat.", "The common reply.", "They commenced.", "There is none."),
    "comments": ("x = 1  # n", "x = 1   # n", "x = 1    # n"),
    "columns": ("a  b", "a   b", "a    b", "a     b"),
    "german": ("Donaudampfschiff", "Donauwelle", "Donnerstag", "Dorfplatz"),
    "russian": ("Правительство", "Право голоса", "Привет", "Программа"),
    "vietnamese": ("Những người", "Như vậy", "Nhưng không", "Nhà máy"),
    "cjk": ("今天的天气很好", "今天是星期一", "今年的人口", "東京都", "カタカナ"),
    "chinese": ("北京时间", "北方地区", "今天天气很好", "中国人民", "中文输入"),
    "japanese": ("東京都です。", "東北地方", "これは本です", "それはペンです"),
    "korean": ("안녕하세요 여러분", "안녕히 가세요", "안내합니다", "학교에서"),
    "hindi": ("किताब पढ़ना", "किताबें पढ़ते", "किसान का", "कितने लोग"),
    "tamil": ("தமிழ்நாடு", "தமிழர்கள்", "தமது", "தலைவர்"),
    "telugu": ("తెలుగులో", "తెలంగాణ రాష్ట్రం", "తెలుపు", "తెలివి"),
    "thai": ("ประเทศไทย", "ประชาชน", "กรุงเทพ", "การเรียน"),
    "georgian": ("საქართველო", "საქმე", "სახლი", "კარგი"),
    "greek": ("Ελλάδα", "ελληνικά", "Ελληνική Δημοκρατία", "έλληνες"),
    "polish": (" źródło", " źrenica", " żółty", " żółć i", " żołnierz"),
    "quotes": ("the word “yes”.", "the word “no”.", "the word ‘no’ —", "the word: yes…"),
    "bengali": ("বাংলাদেশের মানুষ", "বাংলা ভাষা", "বাঙালি", "বাজারে যাই"),
    "hebrew": ("הבית הגדול של", "הבתים הגדולים", "הביתה", "הבן שלי"),
    "arabic": ("الكتاب الجديد", "الكتب", "الكاتب", "كتابة"),
    "symbols": ("∑ x ≤ 5", "∑ x ≥ 3", "∀x ∈ A", "∃x ∉ B"),
    "emoji": ("ok 😀👍", "ok 😃", "ok 👍🏽", "ok ❤️", "ok 🇩🇪"),
}

#: Nats of the student's tokens that continue no text.
LOWEST = -20.0


def main() -> None:
    """Print and store a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_text_options(parser)
    parser.add_argument("--top-k", type=int, default=64, help="of the teacher's rows")
    parser.add_argument("--no-bounds", action="store_true", help="prefix KL with `bounds: false`")
    parser.add_argument("--json", type=Path, metavar="PATH", help="where the figures go")
    options = parser.parse_args()
    table = Table("student", "teacher", "texts", "nats/token", box=box.SIMPLE, padding=0)
    values: dict[str, float] = {}
    for sets in text_sets(parser, options):
        value = measure(
            sets.student,
            sets.teacher,
            sets.texts,
            top_k=options.top_k,
            bounds=not options.no_bounds,
        )
        values[sets.name] = value
        table.add_row(*sets.shown, f"{value:.4f}")
    console = Console()
    console.print(table)
    above = sum(value > 0.01 for value in values.values())
    console.print(
        f"mean {mean(values.values()):.4f}, at most {max(values.values()):.4f} nats a token; "
        f"{above} of {len(values)} above 0.01",
        highlight=False,
    )
    if options.json:
        options.json.write_text(json.dumps(values, indent=1))


@dataclass(frozen=True)
class TextSet:
    """Texts for a student's and a teacher's tokenizer."""

    student: str
    teacher: str
    kind: str
    texts: tuple[str, ...]
    shown: tuple[str, str, str]  # tokenizers and kind, short

    @property
    def name(self) -> str:
        """A key of results."""
        return f"{self.student}:{self.teacher}:{self.kind}"


def add_text_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that ``text_sets`` reads."""
    parser.add_argument("--pairs", default=PAIRS, metavar="STUDENT:TEACHER,…", help="tokenizers")
    parser.add_argument(
        "--texts", action="append", metavar="A|B|C", help="these texts, in place of all kinds"
    )
    parser.add_argument(
        "--random", type=int, default=0, metavar="N", help="N random sets a pair, in place of these"
    )
    parser.add_argument("--seed", type=int, default=0, help="of random sets")


def text_sets(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Iterator[TextSet]:
    """Yield the sets of each pair; invalid options end the program."""
    if options.random and options.texts:
        parser.error("found --random and --texts, expected one of them")
    pairs = pairs_of(parser, options.pairs)
    kinds = {text: tuple(text.split("|")) for text in options.texts or ()} or TEXTS
    for kind, texts in kinds.items():
        if len(set(texts)) < max(len(texts), 2) or "" in texts:
            parser.error(f"--texts: found {kind!r}, expected at least two different texts: 'A|B'")
    drawn = None
    if options.random:
        words = words_of(tokenizer_of(name)[0] for name in sorted({*chain(*pairs)}))
        drawn = RandomTexts(words, options.seed)
    shorts = short_names(chain(*pairs))
    for student, teacher in track(pairs, "pairs", console=Console(stderr=True), transient=True):
        if drawn:
            sets = (drawn.next() for _ in range(options.random))
            kinds = {"|".join(texts): texts for texts in sets}
        for kind, texts in kinds.items():
            shown = shorts[student], shorts[teacher], repr(kind)[1:-1]
            yield TextSet(student, teacher, kind, texts, shown)


def measure(
    student: str, teacher: str, texts: Sequence[str], *, top_k: int = 64, bounds: bool = True
) -> float:
    """Prefix KL in nats per student token, of two models of the same different texts."""
    masses = dict.fromkeys(texts, 1 / len(texts))
    pair = named_pair(student, teacher)
    return false_loss(pair, masses, top_k=top_k, lowest=LOWEST, bounds=bounds)


@cache
def named_pair(student: str, teacher: str) -> Pair:
    """Two tokenizers by name, file or folder."""
    return Pair(_tongue(student, "<over>"), _tongue(teacher, "<stop>"))


@cache
def _tongue(name: str, end: str) -> Tongue:
    tokenizer = Tokenizer.from_str(tokenizer_of(name)[0].to_str())  # a copy
    return Tongue.ended(tokenizer, end)


if __name__ == "__main__":
    main()
