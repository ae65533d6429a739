"use strict";
/* Logged completions: a list that can be filtered and sorted, and one of them in detail. */

const meanOf = (values) => {
  const compared = (values ?? []).filter((value) => value !== null);
  return compared.length ? compared.reduce((total, value) => total + value, 0) / compared.length : NaN;
};

/** Characters of a message by which prompts are compared: those of a summary. */
const COMPARED_TEXT = 500;

/** A logged completion, or its summary, with what lists and details need. */
class Completion {
  constructor(line, run) {
    this.line = line;
    this.run = run;
    this.teachers = Object.keys(line.teachers ?? {});
    this.prompt = (line.prompt ?? []).map((message) => message.content).join("\n");
    this.promptKey = JSON.stringify((line.prompt ?? []).map((message) => [message.role, message.content.slice(0, COMPARED_TEXT)]));
    this.means = Object.fromEntries(this.teachers.map((name) => [name, line.means ? line.means[name] ?? NaN : meanOf(this.nats[name])]));
  }

  get nats() {
    return this.line.nats ?? {};
  }

  get count() {
    return this.line.tokens?.count ?? this.line.count ?? 0;
  }

  /** True for a summary: tokens and the complete texts are loaded when it is shown. */
  get isSummary() {
    return this.line.start !== undefined;
  }

  /** Mean loss per compared token: of a teacher, or of all ("" ). */
  mean(teacher) {
    return teacher ? this.means[teacher] ?? NaN : meanOf(Object.values(this.means).map((mean) => (Number.isNaN(mean) ? null : mean)));
  }

  get tokens() {
    this.cachedTokens ??= this.line.tokens ? new Tokens(this.line.tokens) : null;
    return this.cachedTokens;
  }

  teacherTokens(name) {
    this.cachedTeachers ??= new Map();
    const score = this.line.scores?.[name];
    if (score && !this.cachedTeachers.has(name)) this.cachedTeachers.set(name, new Tokens(score));
    return this.cachedTeachers.get(name) ?? null;
  }
}

const ORDERS = {
  worst: ["Worst first", (a, b, teacher) => descending(a.mean(teacher), b.mean(teacher))],
  newest: ["Newest first", (a, b) => b.line.step - a.line.step],
  oldest: ["Oldest first", (a, b) => a.line.step - b.line.step],
  best: ["Best first", (a, b, teacher) => -descending(a.mean(teacher), b.mean(teacher))],
  longest: ["Longest first", (a, b) => b.count - a.count],
};
const descending = (a, b) => (Number.isNaN(a) ? -Infinity : a) < (Number.isNaN(b) ? -Infinity : b) ? 1 : -1;
const MOST_LISTED = 400;

class Completions {
  constructor(runs) {
    this.runs = runs;
    this.state = { teacher: "", source: "", text: "", order: preferences.read("order", "worst"),
      aligned: preferences.read("aligned", true), selected: 0, lossBy: "" };
    this.list = h("div.list", { role: "listbox", tabindex: 0, "aria-label": "Completions" });
    this.list.addEventListener("keydown", (event) => {
      const move = { ArrowDown: 1, ArrowUp: -1, Home: -1e9, End: 1e9 }[event.key];
      if (move === undefined) return;
      event.preventDefault();
      event.stopPropagation();
      this.move(move);
    });
    this.count = h("span.hint");
    this.detail = h("div.detail", { "aria-live": "off" });
    this.inspector = h("aside.inspector", { "aria-label": "Token", "aria-live": "polite" });
    this.filters = h("div.toolbar");
    this.element = h("section.completions", { "aria-label": "Completions" }, this.filters,
      h("div.split", {}, this.list, h("div.reading", {}, this.detail, this.inspector)));
    this.read();
    this.drawFilters();
    this.drawList();
  }

  /** Take the logged lines of all runs. */
  read() {
    this.all = this.runs.map((run) => run.completions.map((line) => new Completion(line, run)));
    const main = this.all[0];
    this.teachers = [...new Set(main.flatMap((each) => each.teachers))];
    this.sources = [...new Set(main.map((each) => each.line.source))];
    this.scales = new Map(this.teachers.map((name) => [name,
      new ColourScale(this.all.flat().flatMap((each) => (each.nats[name] ?? []).filter((value) => value !== null)))]));
  }

  drawFilters() {
    const choice = (label, name, options) => {
      const select = h("select", { "aria-label": label, onchange: () => {
        this.state[name] = select.value;
        if (name === "order") preferences.save("order", select.value);
        this.state.selected = 0;
        this.drawList();
      } }, options.map(([value, text]) => h("option", { value, selected: this.state[name] === value }, text)));
      select.dataset.filter = name;
      return h("label", {}, `${label} `, select);
    };
    const search = h("input", { type: "search", placeholder: "Search text  /", "aria-label": "Search text", value: this.state.text,
      oninput: () => { this.state.text = search.value.toLowerCase(); this.state.selected = 0; this.drawList(); } });
    this.search = search;
    const aligned = h("input", { type: "checkbox", checked: this.state.aligned, onchange: () => this.toggleAligned() });
    this.alignedBox = aligned;
    this.filters.replaceChildren(search,
      choice("Teacher", "teacher", [["", "all"], ...this.teachers.map((name) => [name, name])]),
      choice("Order", "order", Object.entries(ORDERS).map(([value, [text]]) => [value, text])),
      ...(this.sources.length > 1 ? [choice("Source", "source", [["", "all"], ...this.sources.map((name) => [name, name])])] : []),
      h("label", {}, aligned, " Both tokenizations"), this.count);
  }

  shown() {
    const { teacher, source, text, order } = this.state;
    const lines = this.all[0].filter((each) => (!teacher || each.teachers.includes(teacher)) &&
      (!source || each.line.source === source) &&
      (!text || `${each.prompt}\n${each.line.completion}`.toLowerCase().includes(text)));
    const compare = (ORDERS[order] ?? ORDERS.worst)[1];
    return lines.sort((a, b) => compare(a, b, teacher));
  }

  drawList() {
    this.visible = this.shown().slice(0, MOST_LISTED);
    const { loggedCompletions } = this.runs[0];
    this.count.textContent = `${wholeNumber.format(this.visible.length)} of ${wholeNumber.format(loggedCompletions)} logged completions`;
    const worst = Math.max(...this.visible.map((each) => each.mean(this.state.teacher)).filter(Number.isFinite), 1e-9);
    this.list.replaceChildren(...this.visible.map((each, index) => this.item(each, index, worst)));
    if (!this.visible.length) this.list.append(h("p.empty", {}, "No completion."));
    this.select(Math.min(this.state.selected, this.visible.length - 1), false);
  }

  item(each, index, worst) {
    const mean = each.mean(this.state.teacher), bar = h("span.meter");
    bar.style.width = `${Math.max(1, 100 * (Number.isFinite(mean) ? mean / worst : 0))}%`;
    return h("div.item", { role: "option", id: `completion-${index}`, "aria-selected": "false", onclick: () => this.select(index) },
      h("div.facts", {}, h("span", {}, `step ${wholeNumber.format(each.line.step)}`),
        each.teachers.map((name) => h("span.tag", { class: `tag colour-${this.teachers.indexOf(name) % 8}` }, name)),
        h("span.number", { title: "mean loss of the compared tokens" }, Number.isNaN(mean) ? "not compared" : `${shortNumber(mean)} nats`)),
      h("div.snippet", {}, each.prompt.slice(0, 160)),
      h("div.snippet.completion", {}, each.line.completion.slice(0, 160) || "(empty)"), h("span.rail", {}, bar));
  }

  select(index, scroll = true) {
    this.state.selected = Math.max(0, index);
    for (const option of this.list.querySelectorAll("[aria-selected=true]")) option.setAttribute("aria-selected", "false");
    const option = this.list.children[this.state.selected];
    if (option?.classList.contains("item")) {
      option.setAttribute("aria-selected", "true");
      this.list.setAttribute("aria-activedescendant", option.id);
      if (scroll) option.scrollIntoView({ block: "nearest" });
    }
    this.drawDetail();
  }

  move(by) {
    this.select(Math.max(0, Math.min(this.visible.length - 1, this.state.selected + by)));
  }

  /** The completion of another run that is the most comparable: same prompt, nearest step. */
  counterpart(each, run) {
    const same = this.all[run].filter((other) => other.promptKey === each.promptKey && other.line.source === each.line.source);
    const distance = (other) => Math.abs(other.line.step - each.line.step);
    return same.sort((a, b) => distance(a) - distance(b))[0] ?? null;
  }

  drawDetail() {
    const each = this.visible[this.state.selected];
    this.inspector.replaceChildren(h("p.empty", {}, "Point at a token, or move with the arrow keys."));
    if (!each) return this.detail.replaceChildren();
    const name = this.lossTeacher(each);
    const columns = [each, ...this.runs.slice(1).map((_, index) => this.counterpart(each, index + 1))];
    const summaries = columns.filter((column) => column?.isSummary);
    if (summaries.length) this.load(each, summaries);
    this.detail.replaceChildren(
      h("div.prompt", {}, (each.line.prompt ?? []).map((message) =>
        h("div.message", {}, h("span.role", {}, message.role), h("pre", {}, message.content)))),
      name ? h("div.chosen", {}, this.teacherTabs(each), this.scales.get(name)?.legend(`loss against ${name}, nats`)) : null,
      h("div.columns", {}, columns.map((column, index) => this.column(column, index))));
  }

  /** Load completions, and show them if `each` is still selected. */
  async load(each, summaries) {
    try {
      await Promise.all(summaries.map(({ run, line }) => run.loadCompletion(line)));
    } catch {
      this.inspector.replaceChildren(h("p.empty", {}, "The tokens could not be loaded."));
      return;
    }
    if (this.visible[this.state.selected]?.line === each.line) this.drawDetail();
  }

  lossTeacher(each) {
    if (each.teachers.includes(this.state.lossBy)) return this.state.lossBy;
    return this.state.teacher || each.teachers[0] || "";
  }

  teacherTabs(each) {
    if (each.teachers.length < 2) return null;
    return h("div.tabs.small", { role: "group", "aria-label": "Teacher (t)" }, each.teachers.map((name) =>
      h("button", { type: "button", "aria-pressed": String(name === this.lossTeacher(each)),
        onclick: () => { this.state.lossBy = name; this.drawDetail(); } }, name)));
  }

  column(each, index) {
    const title = this.runs.length > 1 ? h("h3", {}, h("span.run", { class: `run run-${index}` }), this.runs[index].name) : null;
    if (each === null) return h("article", {}, title, h("p.empty", {}, "No logged completion of the same prompt."));
    const { line } = each, name = this.lossTeacher(each);
    const facts = [`step ${wholeNumber.format(line.step)}`, line.source === "answers" ? "reference answer" : null,
      `${wholeNumber.format(each.count)} tokens`, line.finish_reason === "stop" ? "finished" : "cut at the limit",
      ...each.teachers.map((teacher) => `${teacher} ${Number.isNaN(each.means[teacher]) ? "not compared" : `${shortNumber(each.means[teacher])} nats`}`)];
    const teacherTokens = each.teacherTokens(name);
    const aligned = this.state.aligned && teacherTokens;
    const view = !each.tokens ? h("pre.text", {}, line.completion)
      : aligned ? alignedView(each, name, teacherTokens, this.scales.get(name)) : plainView(each, name, this.scales.get(name));
    view.addEventListener("mouseover", (event) => this.inspect(event.target.closest(".token"), each, false));
    view.addEventListener("click", (event) => this.inspect(event.target.closest(".token"), each, true));
    view.addEventListener("keydown", (event) => this.moveToken(event, view, each));
    view.tabIndex = 0;
    return h("article", {}, title, h("p.facts", {}, facts.filter(Boolean).join(" · ")), view,
      each.tokens?.unlisted > 0 ? h("p.empty", {}, `… and ${wholeNumber.format(each.tokens.unlisted)} more tokens`) : null);
  }

  moveToken(event, view, each) {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (by === undefined || isTyping(event)) return;
    event.preventDefault();
    event.stopPropagation();
    const tokens = [...view.querySelectorAll(".token[data-side=student]")];
    const now = tokens.findIndex((token) => token.classList.contains("current"));
    const next = tokens[Math.max(0, Math.min(tokens.length - 1, now + by))];
    next?.scrollIntoView({ block: "nearest" });
    this.inspect(next, each, true);
  }

  /** Show the distributions at a token; `pinned` ones stay until the next click. */
  inspect(token, each, pinned) {
    if (!token || (this.pinned?.isConnected && !pinned && this.pinned !== token)) return;
    if (pinned) this.pinned = this.pinned === token ? null : token;
    this.detail.querySelector(".token.current")?.classList.remove("current");
    this.detail.querySelectorAll(".chunk.current").forEach((chunk) => chunk.classList.remove("current"));
    token.classList.add("current");
    token.closest(".chunk")?.classList.add("current");
    const name = this.lossTeacher(each), teacher = each.teacherTokens(name);
    const index = Number(token.dataset.index), bySide = token.dataset.side;
    const ranges = teacher ? chunkRanges(each.line.scores[name].chunks) : [];
    const range = ranges.find((part) => index >= part[bySide][0] && index < part[bySide][1]);
    const numbers = (side) => (range ? Array.from({ length: range[side][1] - range[side][0] }, (_, n) => range[side][0] + n) : []);
    const students = bySide === "student" ? [index] : numbers("student").slice(0, 4);
    const teachers = bySide === "teacher" ? [index] : numbers("teacher").slice(0, 4);
    const loss = students.length === 1 ? each.nats[name]?.[students[0]] : undefined;
    const kind = range ? { one: "one token on both sides", span: "a span of several tokens", none: "not aligned" }[range.kind] : "";
    this.inspector.replaceChildren(
      h("div.facts", {}, h("strong", {}, `token ${index}`),
        h("span", {}, loss === undefined ? "" : loss === null ? "not compared" : `${shortNumber(loss)} nats against ${name}`),
        h("span", {}, kind), h("span.bytes", {}, `bytes ${(bySide === "student" ? each.tokens : teacher).data.bytes[index].match(/../g)?.join(" ") ?? "none"}`)),
      h("div.pair", {},
        h("div", {}, students.map((number) => likelyBars("student", each.tokens, number))),
        h("div", {}, teachers.map((number) => likelyBars(name, teacher, number)))));
  }

  toggleAligned() {
    this.state.aligned = !this.state.aligned;
    this.alignedBox.checked = this.state.aligned;
    preferences.save("aligned", this.state.aligned);
    this.drawDetail();
  }

  nextTeacher() {
    const each = this.visible[this.state.selected];
    if (!each?.teachers.length) return;
    const now = each.teachers.indexOf(this.lossTeacher(each));
    this.state.lossBy = each.teachers[(now + 1) % each.teachers.length];
    this.drawDetail();
  }

  /** Show new completions; the selected one stays selected. */
  update() {
    const chosen = this.visible?.[this.state.selected]?.line;
    const pinned = this.pinned?.isConnected;
    this.read();
    this.drawFilters();
    const index = this.shown().findIndex((each) => each.line === chosen);
    if (pinned && index >= 0) return; // the reader looks at a token
    this.state.selected = Math.max(0, index);
    this.drawList();
  }
}

/** Tokens of the completion as running text. */
function plainView(each, name, scale) {
  const nats = each.nats[name] ?? [];
  return h("pre.text", { "aria-label": "Tokens of the completion" }, each.tokens.ids.map((_, index) =>
    each.tokens.element(index, { flat: false, shade: shadeOf(scale, nats[index]) })));
}

/** Both tokenizations, span by span: the student's tokens above the teacher's. */
function alignedView(each, name, teacher, scale) {
  const nats = each.nats[name] ?? [];
  const chunks = chunkRanges(each.line.scores[name].chunks).map((range) => {
    const row = (tokens, side, [start, end]) => h("span.row", {}, Array.from({ length: end - start }, (_, offset) =>
      tokens.element(start + offset, { side, shade: side === "student" ? shadeOf(scale, nats[start + offset]) : null })));
    return h(`span.chunk.${range.kind}`, {}, row(each.tokens, "student", range.student), row(teacher, "teacher", range.teacher));
  });
  return h("div.aligned", { "aria-label": "Tokens of student and teacher, span by span" },
    h("span.sides", { "aria-hidden": "true" }, h("span", {}, "student"), h("span", {}, name)), chunks);
}

const shadeOf = (scale, nats) => (nats === undefined || nats === null || !scale ? null : scale.shade(nats));
