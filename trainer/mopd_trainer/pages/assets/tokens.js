"use strict";
/* Tokens as text, their colours, two tokenizations span by span, and the inspector. */

/** Characters that cannot be seen, among them those that change the direction of text. */
const INVISIBLE = /[\p{Cc}\p{Cf}\p{Cn}\p{Co}\p{Zl}\p{Zp}]/u;
const strictDecoder = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

const bytesOf = (hex) => Uint8Array.from(hex.match(/../g) ?? [], (pair) => parseInt(pair, 16));

/** Characters of bytes with their ends; a byte outside any character is a character of its own. */
function characters(bytes) {
  const result = [];
  let start = 0;
  while (start < bytes.length) {
    const lead = bytes[start];
    const length = lead < 0x80 ? 1 : lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : lead >= 0xc0 ? 2 : 1;
    let text = null;
    try {
      text = strictDecoder.decode(bytes.subarray(start, start + length));
    } catch {
      text = null;
    }
    const end = text === null ? start + 1 : Math.min(start + length, bytes.length);
    result.push({ end, text: text === null ? `\\x${lead.toString(16).padStart(2, "0")}` : visible(text) });
    start = end;
  }
  return result;
}

function visible(character) {
  if (character === "\n") return "↵\n";
  if (character === "\t" || !INVISIBLE.test(character)) return character;
  const code = character.codePointAt(0), digits = code.toString(16);
  if (code < 0x100) return `\\x${digits.padStart(2, "0")}`;
  return code < 0x10000 ? `\\u${digits.padStart(4, "0")}` : `\\U${digits.padStart(8, "0")}`;
}

/** One visible string per token (given in hexadecimal); joined, the strings are the text.
    A character that spans several tokens belongs to the last of them. */
function tokenTexts(pieces) {
  const parts = pieces.map(bytesOf);
  const all = new Uint8Array(parts.reduce((size, part) => size + part.length, 0));
  let end = 0;
  const ends = parts.map((part) => {
    all.set(part, end);
    return (end += part.length);
  });
  const text = characters(all);
  let position = 0;
  return ends.map((tokenEnd) => {
    let result = "";
    while (position < text.length && text[position].end <= tokenEnd) result += text[position++].text;
    return result;
  });
}

/** A token in one line: spaces and line ends as marks. */
const oneLine = (text) => text.replaceAll("↵\n", "↵").replaceAll(" ", "␣").replaceAll("\t", "→");

/** The text of a spelling: hexadecimal bytes, or the literal of a control token in <…>. */
function spelledText(spelling) {
  if (spelling === undefined) return "?";
  if (spelling.startsWith("<")) return spelling.slice(1, -1);
  return oneLine(characters(bytesOf(spelling)).map((character) => character.text).join("")) || "(nothing)";
}

const SHADES = 7;

/** Shades for losses: bounds grow quadratically, because most tokens have a small loss; losses above
    the 97th percentile have the last shade. */
class ColourScale {
  constructor(values) {
    const finite = values.filter(Number.isFinite).sort((a, b) => a - b);
    let top = finite.length ? finite[Math.floor(0.97 * (finite.length - 1))] : 0;
    if (!(top > 0)) top = 1;
    this.bounds = Array.from({ length: SHADES - 1 }, (_, index) =>
      Number((top * ((index + 1) / (SHADES - 1)) ** 2).toPrecision(2)));
  }

  shade(nats) {
    return this.bounds.filter((bound) => nats >= bound).length;
  }

  legend(label) {
    const texts = this.bounds.map((bound) => `≥ ${bound}`);
    return h("div.shades", { role: "img", "aria-label": `${label}: shades from below ${this.bounds[0]} to ${this.bounds.at(-1)} and above` },
      h("span.label", {}, label), h("span.s0", {}, `< ${this.bounds[0]}`),
      texts.map((text, index) => h(`span.s${index + 1}`, {}, text)), h("span.uncompared", {}, "not compared"));
  }
}

/** Chunks of the log as ranges: {student: [a, b], teacher: [c, d], kind: one | span | none}. */
function chunkRanges(chunks) {
  const ranges = [];
  let student = 0, teacher = 0;
  const add = (s, t, kind) => {
    ranges.push({ student: [student, student + s], teacher: [teacher, teacher + t], kind });
    student += s;
    teacher += t;
  };
  for (const chunk of chunks) {
    if (Array.isArray(chunk)) add(chunk[0], chunk[1], chunk.length > 2 ? "none" : "span");
    else for (let count = 0; count < chunk; count++) add(1, 1, "one");
  }
  return ranges;
}

/** A list of tokens as it is logged, with texts. */
class Tokens {
  constructor(data) {
    this.data = data;
    this.ids = data.ids;
    this.texts = tokenTexts(data.bytes);
    this.unlisted = data.count - data.ids.length;
  }

  mark(index) {
    return this.data.marks[index] ?? null;
  }

  isPart(index) {
    return !this.texts[index] && this.data.bytes[index] !== "";
  }

  /** A token in one line. */
  label(index) {
    const mark = this.mark(index);
    if (mark !== null) return mark;
    return this.isPart(index) ? this.data.bytes[index].match(/../g).map((pair) => `\\x${pair}`).join("") : oneLine(this.texts[index]);
  }

  /** The element of a token. */
  element(index, { shade = null, side = "student", flat = true } = {}) {
    const mark = this.mark(index);
    const kind = mark !== null ? ".mark" : this.isPart(index) ? ".part" : "";
    const text = flat ? this.label(index) : mark ?? this.texts[index];
    return h(`span.token${kind}${shade === null ? "" : `.s${shade}`}`,
      { "data-index": index, "data-side": side, "aria-label": `token ${index}: ${this.label(index)}` }, text);
  }

  /** Most likely tokens at a row: [{id, text, probability}]; null if they were not logged. */
  likely(index) {
    const ids = this.data.top_ids?.[index];
    if (!ids) return null;
    return ids.map((id, rank) => ({ id, text: spelledText(this.data.spellings[id]),
      probability: Math.exp(this.data.top_logprobs[index][rank] ?? -Infinity) })).filter((entry) => entry.id >= 0);
  }

  probability(index) {
    const logprob = this.data.logprobs?.[index];
    return logprob === undefined || logprob === null ? null : Math.exp(logprob);
  }
}

/** Bars of the most likely tokens at a row, with the completion's token marked. */
function likelyBars(title, tokens, index) {
  const likely = tokens.likely(index), own = tokens.ids[index];
  const heading = h("h4", {}, title, " ", h("code", {}, tokens.label(index)), h("span.id", {}, ` id ${own}`));
  if (likely === null) return h("div.bars", {}, heading, h("p.empty", {}, "Not logged for this token (logging.top_k)."));
  const rows = likely.map((entry) => ({ ...entry, own: entry.id === own }));
  const probability = tokens.probability(index);
  if (!rows.some((row) => row.own) && probability !== null) {
    rows.push({ text: tokens.label(index), id: own, probability, own: true, outside: true });
  }
  const rest = 1 - rows.reduce((total, row) => total + row.probability, 0);
  if (rest > 5e-4) rows.push({ text: "all others", probability: rest, other: true });
  return h("div.bars", {}, heading, h("ol", {}, rows.map((row) => {
    const bar = h("span.bar");
    bar.style.width = `${Math.max(0.5, 100 * row.probability)}%`;
    return h(`li${row.own ? ".own" : ""}${row.other ? ".other" : ""}`, { title: row.id === undefined ? "" : `id ${row.id}` },
      bar, h("code", {}, row.text), h("span.number", {}, percentText(row.probability)));
  })));
}
