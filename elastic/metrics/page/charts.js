"use strict";
// What is drawn and how; nothing here knows of the job. Text from outside only ever becomes text nodes.

const SVG = "http://www.w3.org/2000/svg";

function el(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined && child !== false) {
      node.append(child instanceof Node ? child : document.createTextNode(String(child)));
    }
  }
  return node;
}

function number(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size >= 1000 || size === 0) return Math.round(value).toLocaleString("en-US");
  if (size < 0.001) return value.toExponential(1);
  return String(Number(value.toPrecision(digits)));
}

function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds < 0.0995) return `${number(seconds * 1000, 2)} ms`;
  if (seconds < 9.95) return `${number(seconds, 3)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${number(seconds / 3600, 2)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

function clock(unix, precise = false) {
  return new Date(unix * 1000).toLocaleTimeString("en-GB", precise ? {} : { hour: "2-digit", minute: "2-digit" });
}

// Round values between low and high, about `count` of them.
function ticks(low, high, count, whole = false) {
  const span = high - low || 1;
  const rough = span / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough);
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-6; tick += step) {
    found.push(Math.abs(tick) < step * 1e-6 ? 0 : tick);
  }
  return found;
}

function timeTicks(low, high, count) {
  const steps = [10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 604800];
  const step = steps.find((candidate) => (high - low) / candidate <= count) || steps[steps.length - 1];
  const zone = new Date(low * 1000).getTimezoneOffset() * 60;
  const found = [];
  for (let tick = Math.ceil((low - zone) / step) * step + zone; tick <= high; tick += step) found.push(tick);
  return found;
}

// A curve with its axes in a <figure>; `draw` may be called as often as there is something new.
class Chart {
  constructor(parent, { title, name, onTime = false, fromZero = false, whole = false, steps = false, clip = false, show }) {
    Object.assign(this, { title, name, onTime, fromZero, whole, steps, clip, show });
    this.reading = el("span", {});
    this.canvas = svg("svg", { class: "chart", role: "img", "data-chart": name });
    this.figure = el("figure", {}, el("figcaption", {}, el("b", {}, title), this.reading), this.canvas);
    parent.append(this.figure);
    this.rows = [];
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    new ResizeObserver(() => this.paint()).observe(this.canvas);
  }

  // rows: [x, y] in the order of x, y null = nothing known; events: x values; downs: [from, to] pairs of x.
  draw({ rows, events = [], downs = [] }) {
    Object.assign(this, { rows, events, downs });
    this.paint();
  }

  paint() {
    const known = this.rows.filter(([, y]) => y !== null);
    this.known = known;
    const width = this.canvas.clientWidth || 320;
    const height = this.canvas.clientHeight || 176;
    this.canvas.setAttribute("viewBox", `0 0 ${width} ${height}`);
    if (known.length < 2) {
      this.canvas.replaceChildren(svg("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "nothing to draw yet"));
      this.canvas.setAttribute("aria-label", `${this.title}: nothing to draw yet`);
      this.reading.textContent = "";
      return;
    }
    this.scale(known, width, height);
    const { x, y, box } = this;
    const inside = (value) => value >= this.low && value <= this.high;
    const parts = [];
    for (const tick of ticks(this.bottom, this.top, 4, this.whole)) {
      parts.push(svg("line", { class: "grid", x1: box.left, x2: box.right, y1: y(tick), y2: y(tick) }));
      parts.push(svg("text", { x: box.left - 6, y: y(tick) + 4, "text-anchor": "end" }, number(tick)));
    }
    const xTicks = this.onTime ? timeTicks(this.low, this.high, box.right > 500 ? 6 : 4) : ticks(this.low, this.high, 5, true);
    for (const tick of xTicks.filter((t) => x(t) < box.right - 8 || !this.onTime)) {
      const text = this.onTime ? clock(tick, this.high - this.low < 240) : number(tick);
      parts.push(svg("text", { x: x(tick), y: height - 4, "text-anchor": "middle" }, text));
    }
    for (const [from, to] of this.downs.filter(([from, to]) => to >= this.low && from <= this.high)) {
      const left = x(Math.max(from, this.low));
      const right = x(Math.min(to, this.high));
      parts.push(svg("rect", { class: "down", x: left, y: box.top, width: Math.max(1, right - left), height: box.bottom - box.top }));
    }
    for (const event of this.events.filter(inside)) {
      parts.push(svg("line", { class: "event", x1: x(event), x2: x(event), y1: box.top, y2: box.bottom }));
    }
    for (const run of this.runs()) {
      const line = this.path(run);
      parts.push(svg("path", { class: "area", d: `${line}L${x(run[run.length - 1][0])} ${box.bottom}L${x(run[0][0])} ${box.bottom}Z` }));
      parts.push(svg("path", { class: "curve", d: line }));
    }
    const last = known[known.length - 1];
    parts.push(svg("circle", { class: "now", cx: x(last[0]), cy: y(last[1]), r: 3 }));
    this.hair = svg("line", { class: "hair", y1: box.top, y2: box.bottom, visibility: "hidden" });
    this.canvas.replaceChildren(...parts, this.hair);
    this.canvas.setAttribute("data-points", known.length);
    this.canvas.setAttribute("aria-label", `${this.title}: ${this.show(known[0])}, now ${this.show(last)}`);
    if (!this.held) this.reading.textContent = this.show(last);
  }

  scale(known, width, height) {
    const xs = this.rows.map(([value]) => value);
    const ys = known.map(([, value]) => value).sort((a, b) => a - b);
    this.low = xs[0];
    this.high = Math.max(xs[xs.length - 1], this.low + (this.onTime ? 10 : 1));
    this.bottom = this.fromZero ? 0 : ys[0];
    this.top = ys[ys.length - 1];
    if (this.clip) this.top = Math.min(this.top, 2 * ys[Math.floor(0.97 * (ys.length - 1))]); // a rare one must not flatten the rest
    const room = (this.top - this.bottom || Math.abs(this.top) || 1) * 0.08;
    this.top += room;
    if (!this.fromZero) this.bottom -= room;
    const widest = Math.max(...ticks(this.bottom, this.top, 4, this.whole).map((tick) => number(tick).length));
    const box = { left: 12 + 6.5 * widest, right: width - 8, top: 8, bottom: height - 20 };
    this.box = box;
    this.x = (value) => box.left + ((value - this.low) / (this.high - this.low)) * (box.right - box.left);
    this.y = (value) => box.bottom - ((Math.min(value, this.top) - this.bottom) / (this.top - this.bottom)) * (box.bottom - box.top);
  }

  // The stretches without a hole.
  runs() {
    const found = [];
    let run = [];
    for (const row of this.rows) {
      if (row[1] !== null) run.push(row);
      else if (run.length) { found.push(run); run = []; }
    }
    if (run.length) found.push(run);
    return found;
  }

  path(run) {
    let line = "";
    run.forEach(([at, value], index) => {
      const px = this.x(at).toFixed(1);
      const py = this.y(value).toFixed(1);
      if (!index) line += `M${px} ${py}`;
      else line += this.steps ? `H${px}V${py}` : `L${px} ${py}`;
    });
    return line;
  }

  // What lies under the pointer is told beside the title.
  point(event) {
    this.held = Boolean(event);
    if (!this.known || this.known.length < 2) return;
    let row = this.known[this.known.length - 1];
    if (event) {
      const at = this.low + ((event.offsetX - this.box.left) / (this.box.right - this.box.left)) * (this.high - this.low);
      row = this.known.reduce((best, other) => (Math.abs(other[0] - at) < Math.abs(best[0] - at) ? other : best));
      this.hair.setAttribute("x1", this.x(row[0]));
      this.hair.setAttribute("x2", this.x(row[0]));
    }
    this.hair.setAttribute("visibility", event ? "visible" : "hidden");
    this.reading.textContent = this.show(row, Boolean(event));
  }
}
