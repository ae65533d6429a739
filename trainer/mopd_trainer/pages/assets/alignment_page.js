"use strict";
/* The alignment explorer: a text in the tokens of a student and its teachers. */

const SAMPLES = {
  Prose: "The committee couldn't decide; Mrs. Hargreaves' neighbours, however, agreed at once. Several thousand euros were missing.",
  Code: "for (int i = 0; i < n; ++i) {\n\t\tif (!ok[i]) {\n\t\t\treturn i ** 2;\n\t\t}\n}",
  Numbers: "In 2024, 12,345 + 67,890 = 80,235; pi is 3.14159265 and 1e-07 is small. 0012 0x1F",
  Scripts: "Grüße, naïve cafés! 你好,世界。東京都の人口は約1400万人です。안녕하세요 👩‍🚀🇪🇺 नमस्ते",
};
const TYPING_PAUSE = 350; // milliseconds
const ALIGNMENT_KEYS = [
  ["/", "edit the text"], ["← →", "next and previous token"], ["t", "next teacher"], ["l", "next loss of the check"],
  ["d", "light or dark"], ["?", "this list"],
];

class AlignmentPage {
  constructor(data) {
    Object.assign(this, { live: data.live, tokenizers: data.tokenizers, aligned: data.aligned });
    this.beliefs = new Map(Object.entries(data.beliefs));
    this.teacher = 1; // 0: all teachers
    this.loss = "prefix_kl";
    this.request = 0;
    this.help = keyHelp(ALIGNMENT_KEYS);
    this.status = h("span.state", { role: "status" });
    this.text = h("textarea", { rows: 5, readonly: !this.live, spellcheck: "false", "aria-label": "Text", value: this.aligned.text,
      oninput: () => { clearTimeout(this.timer); this.timer = setTimeout(() => this.align(), TYPING_PAUSE); } });
    this.cards = h("div.cards");
    this.choice = h("div.toolbar");
    this.view = h("div.view", { tabindex: 0 });
    this.check = h("div.check");
    this.inspector = h("aside.inspector", { "aria-label": "Token", "aria-live": "polite" });
    document.getElementById("page").replaceChildren(
      h("header.top", {}, h("div.bar", {}, h("span.brand", {}, "mopd"), h("strong", {}, "Alignment explorer"), this.status, h("span.space"),
        themeButton(), h("button.icon", { type: "button", title: "Keys (?)", "aria-label": "Keys", onclick: () => this.help.showModal() }, "?"))),
      h("main", {}, h("section.text-input", {}, this.text, this.samples()), this.cards, this.choice,
        h("section.explorer", {}, this.view, this.inspector), this.check));
    this.view.addEventListener("mouseover", (event) => this.inspect(event.target.closest(".token")));
    this.view.addEventListener("click", (event) => this.inspect(event.target.closest(".token")));
    document.addEventListener("keydown", (event) => this.key(event));
    this.draw();
    this.requestBeliefs();
  }

  samples() {
    if (!this.live) {
      return h("p.hint", {}, "This page has one text. ", h("code", {}, "mopd align --serve"), " aligns any text.");
    }
    return h("div.toolbar", {}, h("span.hint", {}, "Samples:"), Object.entries(SAMPLES).map(([name, text]) =>
      h("button", { type: "button", onclick: () => { this.text.value = text; this.align(); } }, name)));
  }

  async post(path, body) {
    const response = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
    const value = await response.json();
    if (!response.ok) throw new Error(value.error);
    return value;
  }

  /** Align the text of the field; an older response is ignored. */
  async align() {
    const request = ++this.request;
    this.show("waiting", "aligning");
    try {
      const aligned = await this.post("align", { text: this.text.value });
      if (request !== this.request) return;
      this.aligned = aligned;
      this.beliefs.clear();
      this.show("", "");
      this.draw();
      this.requestBeliefs();
    } catch (error) {
      if (request === this.request) this.show("failing", error.message);
    }
  }

  /** Request the equal-belief check of the teacher in view. */
  async requestBeliefs() {
    const key = String(this.teacher), { request } = this;
    if (!this.live || !this.teacher || this.beliefs.has(key) || !this.aligned.text) return;
    try {
      const beliefs = await this.post("beliefs", { text: this.aligned.text, teacher: this.teacher });
      if (request !== this.request) return;
      this.beliefs.set(key, beliefs);
      this.draw();
    } catch (error) {
      if (request === this.request) this.show("failing", error.message);
    }
  }

  show(kind, text) {
    this.status.className = `state ${kind}`;
    this.status.textContent = text;
    this.status.hidden = !text;
  }

  get pair() {
    return this.aligned.pairs.find((pair) => pair.teacher === this.teacher) ?? null;
  }

  draw() {
    this.tokens = this.aligned.tokens.map((tokens) => new Tokens(tokens));
    this.show("", "");
    this.drawCards();
    this.drawChoice();
    this.drawView();
    this.drawCheck();
    this.inspector.replaceChildren(h("p.empty", {}, "Point at a token for its projection row."));
  }

  drawCards() {
    const size = new TextEncoder().encode(this.aligned.text).length;
    this.cards.replaceChildren(...this.tokenizers.map((tokenizer, index) => {
      const count = this.tokens[index].ids.length, pair = this.aligned.pairs.find((each) => each.teacher === index);
      const facts = [["tokens", wholeNumber.format(count)], ["bytes per token", count ? (size / count).toFixed(2) : "–"],
        ["vocabulary", wholeNumber.format(tokenizer.ids)],
        ...(pair ? [["aligned", percentText(pair.aligned_share)], ["spans", wholeNumber.format(pair.spans)],
          ["one-to-one", pair.spans ? percentText(pair.one_to_one / pair.spans) : "–"]] : [])];
      return h("article.card", {}, h("header", {}, h("h3", { title: tokenizer.name }, shortName(tokenizer.name)),
        h("span.state", {}, index ? "teacher" : "student")),
        pair && !pair.same_text ? h("p.warning", {}, "The texts differ: a tokenizer normalizes, or cannot represent this text.") : null,
        h("dl", {}, facts.map(([term, value]) => h("div", {}, h("dt", {}, term), h("dd", {}, value)))));
    }));
  }

  drawChoice() {
    const option = (number, name) => h("button", { type: "button", "aria-pressed": String(this.teacher === number),
      onclick: () => this.choose(number) }, name);
    this.choice.replaceChildren(h("div.tabs.small", { role: "group", "aria-label": "Teacher (t)" },
      this.tokenizers.slice(1).map((tokenizer, index) => option(index + 1, shortName(tokenizer.name))),
      this.tokenizers.length > 2 ? option(0, "all") : null),
      h("span.hint", {}, "Boxes: several tokens spell the same bytes. Dashed: not aligned."));
  }

  choose(teacher) {
    this.teacher = teacher;
    this.draw();
    this.requestBeliefs();
  }

  get belief() {
    const beliefs = this.beliefs.get(String(this.teacher)) ?? [];
    return beliefs.find((each) => each.loss === this.loss && !each.error) ?? null;
  }

  drawView() {
    if (!this.tokens[0].ids.length) return this.view.replaceChildren(h("p.empty", {}, "No text."));
    const sides = this.teacher ? [0, this.teacher] : this.tokenizers.map((_, index) => index);
    const { belief } = this, scale = new ColourScale([1]);
    const shade = (index) => (belief?.nats[index] === undefined || belief.nats[index] === null ? null : scale.shade(belief.nats[index]));
    const row = (side, [start, end]) => h("span.row", {}, Array.from({ length: end - start }, (_, offset) => {
      const element = this.tokens[side].element(start + offset, { side: side ? "teacher" : "student", shade: side ? null : shade(start + offset) });
      element.dataset.tokenizer = side;
      return element;
    }));
    const parts = this.teacher ? chunkRanges(this.pair.chunks).map((range) => ({ kind: range.kind, ranges: [range.student, range.teacher] }))
      : commonParts(this.tokens);
    this.view.replaceChildren(h("div.aligned", {},
      h("span.sides", { "aria-hidden": "true" }, sides.map((side) => h("span", {}, shortName(this.tokenizers[side].name)))),
      parts.map(({ kind, ranges }) => h(`span.chunk.${kind}`, {}, sides.map((side, index) => row(side, ranges[index]))))));
  }

  /** The equal-belief check: a table of losses, and the choice of the one that colours the tokens. */
  drawCheck() {
    const title = [h("h2", {}, "Equal-belief check"), h("p.hint", {}, "Two models that give every token of this text the probability 0.999 agree. ",
      "A loss should be close to 0 (below 0.01 nats per token) and push no token down. The colours above are the chosen loss.")];
    if (!this.teacher) return this.check.replaceChildren(...title, h("p.empty", {}, "Choose one teacher."));
    const beliefs = this.beliefs.get(String(this.teacher));
    if (!beliefs) return this.check.replaceChildren(...title, h("p.empty", {}, this.live ? "Computing …" : "Not in this file."));
    this.check.replaceChildren(...title, h("div.scroll", {}, h("table.numbers", {}, h("thead", {}, h("tr", {},
      ["loss", "", "nats per token", "worst token", "pushed down", "compared tokens"].map((name) => h("th", {}, name)))),
      h("tbody", {}, beliefs.map((each) => this.checkRow(each))))));
  }

  checkRow(each) {
    const button = h("button", { type: "button", "aria-pressed": String(each.loss === this.loss), disabled: Boolean(each.error),
      onclick: () => { this.loss = each.loss; this.draw(); } }, each.loss);
    if (each.error) return h("tr", {}, h("td", {}, button), h("td", { colspan: 5 }, each.error));
    const pushed = each.pushed_down.filter(Boolean).length;
    const passed = Math.abs(each.nats_per_token) <= 0.01 && !pushed;
    return h("tr", { "data-loss": each.loss }, h("td", {}, button), h("td", {}, h("span", { class: `state ${passed ? "healthy" : "waiting"}` }, passed ? "agrees" : "false loss")),
      [each.nats_per_token.toFixed(4), shortNumber(Math.max(0, ...each.nats.filter((value) => value !== null))),
        percentText(pushed / Math.max(1, each.tokens)), `${wholeNumber.format(each.compared)} of ${wholeNumber.format(each.tokens)}`]
        .map((value) => h("td", {}, value)));
  }

  /** Show a token's projection row, or the student's tokens that project to a teacher's token. */
  inspect(token) {
    if (!token) return;
    this.view.querySelector(".token.current")?.classList.remove("current");
    token.classList.add("current");
    const side = Number(token.dataset.tokenizer), index = Number(token.dataset.index), tokens = this.tokens[side], id = tokens.ids[index];
    const facts = h("div.facts", {}, h("strong", {}, shortName(this.tokenizers[side].name)), h("span", {}, `token ${index}`), h("span", {}, `id ${id}`),
      h("span.bytes", {}, `bytes ${tokens.data.bytes[index].match(/../g)?.join(" ") ?? "none"}`),
      !side && this.belief?.nats[index] !== undefined ? h("span", {}, `${this.loss}: ${this.belief.nats[index] === null ? "not compared" : `${shortNumber(this.belief.nats[index])} nats`}`) : null);
    const pairs = this.aligned.pairs.filter((pair) => (side ? pair.teacher === side : !this.teacher || pair.teacher === this.teacher));
    this.inspector.replaceChildren(facts, h("div.pair", {}, pairs.map((pair) => (side ? this.sources(pair, id) : this.row(pair, id, tokens.label(index))))));
  }

  row(pair, id, label) {
    const { rows, spellings } = pair.projection;
    return weightBars(`${label} → ${shortName(this.tokenizers[pair.teacher].name)}`, (rows[id] ?? []).map(([target, weight]) =>
      [spelledText(spellings[target]), weight, `id ${target}`]), "No teacher token: its probability is not projected.");
  }

  sources(pair, id) {
    const student = this.tokens[0], seen = new Map();
    student.ids.forEach((source, index) => {
      const entry = (pair.projection.rows[source] ?? []).find(([target]) => target === id);
      if (entry) seen.set(source, [student.label(index), entry[1], `id ${source}`]);
    });
    return weightBars("student tokens of this text that project to it", [...seen.values()], "None in this text.");
  }

  key(event) {
    if (event.key === "Escape" && isTyping(event)) return event.target.blur();
    if (isTyping(event) || this.help.open) return;
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (by) {
      const tokens = [...this.view.querySelectorAll(".token[data-side=student]")];
      const now = tokens.findIndex((token) => token.classList.contains("current"));
      const next = tokens[Math.max(0, Math.min(tokens.length - 1, now + by))];
      next?.scrollIntoView({ block: "nearest" });
      this.inspect(next);
    } else if (event.key === "t") this.choose((this.teacher + 1) % this.tokenizers.length || (this.tokenizers.length > 2 ? 0 : 1));
    else if (event.key === "l") {
      const losses = (this.beliefs.get(String(this.teacher)) ?? []).filter((each) => !each.error).map((each) => each.loss);
      this.loss = losses[(losses.indexOf(this.loss) + 1) % losses.length] ?? this.loss;
      this.draw();
    } else if (event.key === "/") this.text.focus();
    else if (event.key === "d") theme.toggle();
    else if (event.key === "?") this.help.showModal();
    else return;
    event.preventDefault();
  }
}

/** The last part of a path; a URL in full. */
function shortName(name) {
  if (/^https?:/.test(name)) return name;
  const parts = name.split("/").filter(Boolean);
  return parts.at(-1) === "tokenizer.json" && parts.length > 1 ? parts.at(-2) : parts.at(-1) ?? name;
}

/** The finest parts of a text at whose ends every tokenizer has an end. */
function commonParts(all) {
  const ends = all.map((tokens) => {
    let end = 0;
    return tokens.data.bytes.map((hex) => (end += hex.length / 2));
  });
  const known = ends.map((each) => new Set(each));
  const common = [...known[0]].filter((end) => known.every((each) => each.has(end)));
  const positions = all.map(() => 0), parts = [];
  for (const end of common) {
    const ranges = ends.map((each, side) => {
      const start = positions[side];
      while (positions[side] < each.length && each[positions[side]] <= end) positions[side]++;
      return [start, positions[side]];
    });
    parts.push({ ranges, kind: ranges.every(([start, stop]) => stop - start === 1) ? "one" : "span" });
  }
  const rest = positions.map((start, side) => [start, ends[side].length]);
  if (rest.some(([start, end]) => end > start)) parts.push({ ranges: rest, kind: "none" });
  return parts;
}

function weightBars(title, entries, empty) {
  return h("div.bars", {}, h("h4", {}, title), entries.length ? h("ol", {}, entries.map(([text, weight, note]) => {
    const bar = h("span.bar");
    bar.style.width = `${Math.max(0.5, 100 * weight)}%`;
    return h("li", { title: note }, bar, h("code", {}, text), h("span.number", {}, percentText(weight)));
  })) : h("p.empty", {}, empty));
}

new AlignmentPage(embeddedData());
