"use strict";
/* Health of the teachers, evaluations, dropped samples and settings, as tables. */

/** Counters of events that mean trouble, worst first. */
const EVENTS = [["failures", "failing"], ["waits", "waiting"], ["fallbacks", "replaced"], ["retries", "retried"]];
const RECENT_STEPS = 20;

const cells = (tag, values) => values.map((value) => h(tag, {}, value));
const table = (head, rows) =>
  h("div.scroll", {}, h("table.numbers", {}, h("thead", {}, h("tr", {}, cells("th", head))),
    h("tbody", {}, rows.map((row) => h("tr", {}, cells("td", row))))));

/** State of a teacher in the last steps. */
function teacherState(run, name) {
  const recent = (key) => (run.column(`teacher/${name}/${key}`) ?? []).slice(-RECENT_STEPS)
    .reduce((total, value) => total + (value || 0), 0);
  for (const [key, state] of EVENTS) if (recent(key)) return state;
  return "healthy";
}

class Teachers {
  constructor(runs) {
    this.runs = runs;
    this.element = h("section", { "aria-label": "Teachers" });
    this.update();
  }

  update() {
    this.element.replaceChildren(...this.runs.flatMap((run) => [
      this.runs.length > 1 ? h("h2", {}, h("span", { class: `run run-${run.index}` }), run.name) : null,
      h("div.cards", {}, run.teachers.map((name) => this.card(run, name))),
      this.evaluations(run), this.dropped(run)].filter(Boolean)));
  }

  card(run, name) {
    const key = (last) => `teacher/${name}/${last}`, state = teacherState(run, name);
    const facts = [
      ["loss", `${shortNumber(run.last(key("loss")))} nats`], ["compared", percentText(run.last(key("compared_share")))],
      ["top-k coverage", percentText(run.last(key("teacher_mass_mean")))],
      ["request, median", durationText(run.last(key("score_seconds_p50")))],
      ["request, 95 %", durationText(run.last(key("score_seconds_p95")))],
      ["scored tokens", shortNumber(run.sum(key("scored_tokens")))], ["received", bytesText(run.sum(key("received_bytes")))],
      ...["retries", "failures", "waits", "fallbacks", "breaker_openings"].map((last) =>
        [last.replace("_", " "), wholeNumber.format(run.sum(key(last)))])];
    return h("article.card", {},
      h("header", {}, h("h3", {}, name), h("span", { class: `state ${state}` }, state)),
      h("div.sparks", {}, h("span", {}, "loss ", sparkline(run.column(key("loss")) ?? [], { width: 150 })),
        h("span", {}, "request ", sparkline(run.column(key("score_seconds_p95")) ?? [], { width: 150, floor: 0 }))),
      this.events(run, name),
      h("dl", {}, facts.map(([term, value]) => h("div", {}, h("dt", {}, term), h("dd", {}, value)))));
  }

  /** A strip over all steps with a mark where requests failed, waited or were repeated. */
  events(run, name) {
    const width = 320, count = run.steps.length;
    const strip = drawn("svg", { viewBox: `0 0 ${width} 8`, class: "events", preserveAspectRatio: "none", role: "img",
      "aria-label": `${name}: steps with failures, waits or retries` });
    for (const [key, state] of [...EVENTS].reverse()) {
      (run.column(`teacher/${name}/${key}`) ?? []).forEach((value, row) => {
        if (value > 0) strip.append(drawn("rect", { x: (row / count) * width, width: Math.max(1.5, width / count), y: 0, height: 8, class: state }));
      });
    }
    return strip;
  }

  evaluations(run) {
    const results = new Map(); // "set, model" -> metric -> value
    for (const key of run.keys) {
      const parts = evaluationParts(key);
      if (!parts || parts.metric.includes("/") && !parts.metric.includes("gap_closed")) continue;
      const row = `${parts.set}\u0000${parts.teacher}`;
      results.set(row, { ...results.get(row), [parts.metric]: run.last(key) });
    }
    if (!results.size) return null;
    const share = (row, name) => (row[name] === undefined ? "–" : row[`${name}_low`] === undefined ? percentText(row[name])
      : `${percentText(row[name])} (${(100 * row[`${name}_low`]).toFixed(1)}–${(100 * row[`${name}_high`]).toFixed(1)})`);
    const rows = [...results].sort().map(([row, values]) => {
      const [set, teacher] = row.split("\u0000");
      const gaps = Object.entries(values).filter(([name]) => name.startsWith("gap_closed/"));
      const passes = Object.keys(values).filter((name) => name.startsWith("pass_at_"));
      return [set, teacher ? `teacher ${teacher}` : "student", share(values, "accuracy"), share(values, "sampled_accuracy"),
        passes.map((name) => `pass@${name.slice(8)} ${percentText(values[name])}`).join(", ") || "–",
        values.bits_per_byte === undefined ? "–" : values.bits_per_byte.toFixed(4),
        gaps.map(([name, value]) => `${percentText(value)}${gaps.length > 1 ? ` of ${name.slice(11)}` : ""}`).join(", ") || "–"];
    });
    return h("div", {}, h("h2", {}, "Last evaluation"),
      table(["set", "model", "accuracy", "sampled", "pass@k", "bits per byte", "gap closed"], rows));
  }

  dropped(run) {
    const rows = run.keys.filter((key) => key.startsWith("dropped/")).map((key) => [key.slice(8), run.sum(key)])
      .filter(([, total]) => total).map(([reason, total]) => [reason, wholeNumber.format(total)]);
    return h("div", {}, h("h2", {}, "Dropped samples"), rows.length ? table(["reason", "samples"], rows) : h("p.empty", {}, "None."));
  }
}

/** The settings of the runs; of two runs, lines that differ are marked. */
class RunSettings {
  constructor(runs) {
    const lines = runs.map((run) => run.config.split("\n"));
    const others = lines.map((_, index) => new Set(lines[1 - index] ?? lines[index]));
    this.element = h("section", { "aria-label": "Settings" }, h("div.columns", {}, runs.map((run, index) =>
      h("article", {}, h("h3", {}, run.folder), h("pre.config", {}, lines[index].map((line) =>
        h(others[index].has(line) ? "span" : "mark", {}, `${line}\n`)))))));
  }

  update() {}
}
