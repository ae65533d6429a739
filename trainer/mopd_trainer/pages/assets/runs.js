"use strict";
/* Metrics of a run as columns, and what can be computed from their names. */

function decoded(text, type) {
  const characters = atob(text), bytes = new Uint8Array(characters.length);
  for (let index = 0; index < characters.length; index++) bytes[index] = characters.charCodeAt(index);
  return new type(bytes.buffer);
}

/** A run: `steps` and columns of the same length, NaN where a metric was not measured. */
class RunMetrics {
  constructor(data, index) {
    this.index = index;
    this.name = data.name;
    this.folder = data.folder;
    this.config = data.config;
    this.maxSteps = data.max_steps;
    this.steps = Array.from(decoded(data.steps, Float32Array));
    this.encodedLength = this.steps.length;
    this.encoded = new Map(Object.entries(data.columns));
    this.columns = new Map();
    this.completions = data.completions;
    this.loggedCompletions = data.logged_completions;
    this.positions = { journal: data.journal_position, completions: data.completions_position };
    this.damaged = data.damaged;
    this.damagedLines = data.damaged_lines;
    this.age = null; // seconds since the last line, of a live page
  }

  get keys() {
    return [...new Set([...this.encoded.keys(), ...this.columns.keys()])];
  }

  has(key) {
    return this.encoded.has(key) || this.columns.has(key);
  }

  /** The values of a metric by step; decoded when first used. */
  column(key) {
    let values = this.columns.get(key);
    if (values === undefined && this.encoded.has(key)) {
      const parts = this.encoded.get(key);
      if (parts.length === 1) values = Array.from(decoded(parts[0], Float32Array));
      else {
        values = Array(this.encodedLength).fill(NaN);
        const rows = decoded(parts[0], Int32Array);
        decoded(parts[1], Float32Array).forEach((value, index) => { values[rows[index]] = value; });
      }
      this.columns.set(key, values);
    }
    if (values !== undefined) while (values.length < this.steps.length) values.push(NaN);
    return values ?? null;
  }

  /** The last measured value; NaN if there is none. */
  last(key) {
    const values = this.column(key) ?? [];
    for (let row = values.length - 1; row >= 0; row--) if (!Number.isNaN(values[row])) return values[row];
    return NaN;
  }

  sum(key) {
    return (this.column(key) ?? []).reduce((total, value) => total + (value || 0), 0);
  }

  get lastStep() {
    return this.steps.length ? this.steps[this.steps.length - 1] : 0;
  }

  get isFinished() {
    return this.maxSteps !== null && this.lastStep >= this.maxSteps;
  }

  /** Add lines of the journal. Lines of one step are merged. */
  append(text) {
    const added = parsedLines(text);
    for (const { step, ...metrics } of added) {
      if (!this.steps.length || this.lastStep !== step) this.steps.push(step);
      const row = this.steps.length - 1;
      for (const [key, value] of Object.entries(metrics)) {
        if (typeof value !== "number") continue;
        if (!this.has(key)) this.columns.set(key, Array(this.steps.length).fill(NaN));
        this.column(key)[row] = value;
      }
    }
    return added.length;
  }

  /** Add summaries of logged completions. */
  appendCompletions(added) {
    this.completions.push(...added);
    this.loggedCompletions += added.length;
    return added.length;
  }

  /** Replace a summary by the complete line, which the server of the page returns. */
  async loadCompletion(line) {
    const response = await fetch(`completion?run=${this.index}&start=${line.start}`);
    if (!response.ok) throw new Error(response.statusText);
    Object.assign(line, await response.json());
    delete line.start;
  }

  /** Names of the teachers; a name may contain a slash, the metric after it does not. */
  get teachers() {
    const names = this.keys.filter((key) => key.startsWith("teacher/"))
      .map((key) => key.slice("teacher/".length, key.lastIndexOf("/")));
    return [...new Set(names)];
  }
}

function parsedLines(text) {
  const lines = [];
  for (const line of text.split("\n")) {
    if (!line) continue;
    try {
      const value = JSON.parse(line);
      if (value !== null && Number.isInteger(value.step)) lines.push(value);
    } catch {
      // A damaged line; the report names it.
    }
  }
  return lines;
}

const EVALUATION = /^evaluation\/([^/]+)\/(?:teacher\/(.+?)\/)?((?:source\/.+\/|\w*gap_closed\/.+)?[^/]*)$/;

/** Set, teacher ("" for the student) and metric of an evaluation's key; null for other keys. */
function evaluationParts(key) {
  const match = EVALUATION.exec(key);
  return match && { set: match[1], teacher: match[2] ?? "", metric: match[3] };
}
