"use strict";
/* The viewer's page. It runs from the viewer's server, or from one file that holds its data (`--out`). */

const at = (id) => document.getElementById(id);
const holder = at("embedded");
const embedded = holder ? JSON.parse(holder.textContent) : null;
const ROW = 28; // pixels of a row of the list

// ---- data

async function answer(response) {
  const value = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(value.error || `the viewer answered ${response.status}`);
  return value;
}

const lost = (error) => {
  throw error instanceof TypeError ? new Error("the viewer has ended: start `serl-chunk view` again") : error;
};
const get = (path) => fetch(path).then(answer, lost);

const data = embedded
  ? {
      info: async () => embedded.info,
      list: async (first) => ({ ...embedded.list, rows: embedded.list.rows.slice(first) }),
      episode: async (n) => {
        if (embedded.episodes[n]) return embedded.episodes[n];
        throw new Error(embedded.rows_only);
      },
      frame: (n, camera, i) => camera.files[i],
    }
  : {
      info: () => get("info"),
      list: (first) => get(`list/${first}`),
      episode: (n) => get(`episode/${n}`),
      frame: (n, camera, i) => `frame/${n}/${encodeURIComponent(camera.name)}/${i}`,
      label: (n, label) =>
        fetch(`label/${n}`, {
          method: "POST",
          headers: { "Content-Type": "application/json" },
          body: JSON.stringify({ label: label || null }),
        }).then(answer, lost),
    };

// ---- the list

const COLUMNS = [
  ["number", "no."],
  ["outcome", "outcome"],
  ["by", "by"],
  ["length", "steps"],
  ["reward", "return"],
  ["human", "human"],
  ["lowest_q", "lowest Q"],
];
const state = { info: null, rows: [], shown: [], sort: ["number", 1], chosen: -1, episode: null, tick: 0, playing: false };

const shape = (row) => (row.error ? "error" : row.label === "discard" ? "discard" : row.outcome);
const WORDS = { error: "unreadable", discard: "discarded" };
const number = (value, digits = 4) =>
  value === null || value === undefined ? "" : String(Number(value.toPrecision(digits)));
const percent = (value) => (value === null ? "" : `${Math.round(100 * value)} %`);

function element(tag, attributes = {}, ...content) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else made.setAttribute(name, value);
  }
  made.append(...content);
  return made;
}

function cells(row) {
  const outcome = element("span", { class: shape(row) + (row.label ? " labelled" : "") }, WORDS[shape(row)] || row.outcome);
  if (row.error) return [row.number, outcome, "", "", "", "", ""];
  return [
    row.number, outcome, row.by, row.length, number(row.reward), percent(row.human), number(row.lowest_q, 3),
  ];
}

function filtered() {
  const form = new FormData(at("filters"));
  const value = (name) => form.get(name).trim();
  const least = value("human_min") === "" ? -Infinity : Number(value("human_min")) / 100;
  const most = value("human_max") === "" ? Infinity : Number(value("human_max")) / 100;
  const q = value("q_max") === "" ? null : Number(value("q_max"));
  const text = value("text").toLowerCase();
  const limited = least > 0 || most < 1;
  return state.rows.filter(
    (row) =>
      (!value("outcome") || shape(row) === value("outcome")) &&
      (!value("by") || row.by === value("by")) &&
      (!limited || (row.human !== null && row.human >= least && row.human <= most)) &&
      (q === null || (row.lowest_q !== null && row.lowest_q <= q)) &&
      (!text || `${row.key} ${row.task}`.toLowerCase().includes(text)),
  );
}

function sorted(rows) {
  const [name, way] = state.sort;
  const value = (row) => (name === "outcome" ? shape(row) : row[name]);
  return rows.slice().sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === y) return a.number - b.number;
    if (x === null || x === "") return 1; // what has none comes last
    if (y === null || y === "") return -1;
    return (x < y ? -1 : 1) * way;
  });
}

function updateList() {
  state.shown = sorted(filtered());
  const { total } = state.info;
  const listed = state.rows.length < total ? `, ${state.rows.length} of ${total} read so far` : "";
  at("count").textContent = `${state.shown.length} of ${total} episodes${listed}`;
  at("space").style.height = `${state.shown.length * ROW}px`;
  for (const button of at("head").children) {
    const [name, way] = state.sort;
    button.querySelector("span").textContent = button.dataset.name === name ? (way > 0 ? " \u25b4" : " \u25be") : "";
  }
  drawRows();
}

function drawRows() {
  const list = at("list");
  const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 5);
  const rows = state.shown.slice(first, first + Math.ceil(list.clientHeight / ROW) + 10);
  at("rows").style.top = `${first * ROW}px`;
  at("rows").replaceChildren(
    ...rows.map((row) => {
      const selected = row.number === state.chosen;
      const line = element("div", { class: "row", role: "option", "aria-selected": selected, title: row.error || row.key });
      line.append(...cells(row).map((cell) => (cell instanceof Node ? cell : element("span", {}, String(cell)))));
      line.onclick = () => choose(row.number);
      return line;
    }),
  );
}

function reveal() {
  const index = state.shown.findIndex((row) => row.number === state.chosen);
  const list = at("list");
  if (index < 0) return;
  if (index * ROW < list.scrollTop) list.scrollTop = index * ROW;
  else if ((index + 1) * ROW > list.scrollTop + list.clientHeight) list.scrollTop = (index + 1) * ROW - list.clientHeight;
}

function neighbour(step) {
  const index = state.shown.findIndex((row) => row.number === state.chosen);
  const next = state.shown[index < 0 ? 0 : Math.min(Math.max(index + step, 0), state.shown.length - 1)];
  if (next && next.number !== state.chosen) choose(next.number);
}

async function fill() {
  for (;;) {
    const got = await data.list(state.rows.length);
    state.rows.push(...got.rows);
    const judges = [...new Set(state.rows.map((row) => row.by).filter(Boolean))].sort();
    const select = at("filters").elements.by;
    for (const name of judges.filter((by) => ![...select.options].some((o) => o.value === by)))
      select.append(element("option", {}, name));
    updateList();
    if (state.rows.length >= got.total) return;
    if (got.rows.length < 100) await new Promise((done) => setTimeout(done, 400)); // it is being gathered
  }
}

// ---- an episode

async function choose(n, tick = 0) {
  pause();
  state.chosen = n;
  history.replaceState(null, "", `#${n}`);
  drawRows();
  reveal();
  try {
    const episode = await data.episode(n);
    if (state.chosen === n) show(episode, tick);
  } catch (error) {
    if (state.chosen === n) showFault(n, error.message);
  }
}

function showFault(n, text) {
  const row = state.rows[n];
  state.episode = null;
  at("empty").hidden = true;
  at("episode").hidden = false;
  at("name").textContent = `Episode ${n}`;
  at("fault").textContent = (row && row.error) || text;
  for (const id of ["facts", "cameras", "wide", "panels", "legend"]) at(id).replaceChildren();
  at("player").hidden = at("strip").hidden = true;
  showLabel(row);
}

function show(episode, tick) {
  state.episode = episode;
  at("empty").hidden = true;
  at("episode").hidden = at("player").hidden = at("strip").hidden = false;
  at("name").textContent = `Episode ${state.chosen}`;
  at("fault").textContent = "";
  at("tick").max = episode.length - 1;
  showFacts();
  showLabel(state.rows[state.chosen] || episode.row);
  at("cameras").replaceChildren(
    ...episode.cameras.map((camera) => {
      const image = element("img", { alt: `camera ${camera.name}`, width: camera.width, height: camera.height });
      image.style.aspectRatio = `${camera.width} / ${camera.height}`;
      image.style.width = "auto";
      camera.view = { figure: element("figure", {}, image, element("figcaption")), image, wanted: -1, busy: false };
      return camera.view.figure;
    }),
  );
  makePanels();
  drawPlots();
  seek(Math.min(tick, episode.length - 1));
}

function showFacts() {
  const e = state.episode;
  const row = state.rows[state.chosen] || e.row || {};
  const seconds = e.hz ? ` (${number(e.length / e.hz, 3)} s at ${number(e.hz)} Hz)` : "";
  const [first, last] = [e.versions[0], e.versions[e.versions.length - 1]].map((v) => (v ? v[1] : -1));
  const facts = [
    ["length", `${e.length} steps${seconds}`, "span"],
    ["outcome", row.outcome || e.outcome],
    ["judged by", row.by || e.by],
    ["ended", e.terminated ? "terminated" : "truncated"],
    ["return", number(row.reward)],
    ["human share", percent(row.human ?? null)],
    ["lowest Q", number(row.lowest_q, 3)],
    ["policy version", last < 0 ? "" : first === last ? String(last) : `${first} to ${last}`],
    ["gaps", e.gaps.length ? String(e.gaps.length) : ""],
    ["recorded as", e.demonstration ? "a demonstration" : ""],
    ["task", e.task, "span"],
    ["name", row.key || e.id, "span"],
    ["conditions", e.conditions, "span"],
    ["left out", e.left_out || "", "span"],
  ].filter(([, value]) => value);
  at("facts").replaceChildren(
    ...facts.map(([name, value, wide]) =>
      element("div", { class: wide || "" }, element("dt", {}, name), element("dd", {}, value)),
    ),
  );
}

function showLabel(row) {
  const off = !data.label || Boolean(state.info.refusal);
  at("labels").hidden = at("labelkeys").hidden = !data.label;
  for (const button of at("labels").querySelectorAll("button")) {
    button.setAttribute("aria-pressed", Boolean(row && row.label && row.label === button.dataset.label));
    button.disabled = off || (state.info.final_discard && Boolean(row) && row.label === "discard");
    button.title = state.info.refusal;
  }
  at("labelled").textContent = "";
}

async function label(value) {
  const n = state.chosen;
  if (n < 0 || !data.label) return;
  const row = state.rows[n];
  if (state.info.final_discard && row && row.label === "discard") return;
  if (state.info.refusal) return void (at("labelled").textContent = state.info.refusal);
  const certain = "A run's journal keeps no way back from a discard. Discard this episode?";
  if (value === "discard" && state.info.final_discard && !confirm(certain)) return;
  at("labelled").textContent = "writing ...";
  try {
    const got = await data.label(n, value);
    state.rows[n] = got.row;
    updateList();
    const discarded = got.row.label === "discard"; // no run lists it any more
    const episode = got.row.error || discarded ? null : await data.episode(n);
    if (state.chosen !== n) return;
    if (episode) show(episode, state.tick);
    else showLabel(got.row);
    at("labelled").textContent = "written";
  } catch (error) {
    if (state.chosen === n) at("labelled").textContent = error.message;
  }
}

// ---- plots

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const TINT = { human: "human", hold: "hold" };
const ACTORS = { policy: "policy", human: "human", hold: "hold", scripted: "other", random: "other" };
let panels = [];

function makePanels() {
  const e = state.episode;
  const each = (values) => values.map((_, i) => i);
  const made = [];
  if (e.q) {
    const { ticks, q, low, high, std } = e.q;
    const bands = [{ ticks, low, high, colour: "state" }];
    const off = (sign) => q.map((v, i) => (v === null ? null : v + sign * (std[i] ?? 0)));
    if (std) bands.push({ ticks, low: off(-1), high: off(1), colour: "action" });
    const shown = [];
    if (low.some((v, i) => v !== q[i])) shown.push("the range of the candidates (blue)");
    if (std) shown.push("one deviation of the critic's heads (orange)");
    made.push({
      title: `Q of the decisions${shown.length ? ", with " : ""}${shown.join(" and ")}`,
      wide: true,
      lines: [{ ticks, values: q, colour: "state", dots: true }],
      bands,
    });
  }
  if (e.reward.some((v) => v !== 0))
    made.push({ title: "reward", wide: true, lines: [{ ticks: each(e.reward), values: e.reward, colour: "reward", bars: true }] });
  for (const p of e.panels) {
    const lines = [];
    if (p.state !== null) lines.push({ ticks: each(e.reward), values: e.state[p.state], colour: "state" });
    if (p.action !== null) lines.push({ ticks: each(e.reward), values: e.action[p.action], colour: "action", dash: true });
    made.push({ title: p.title, lines });
  }
  for (const panel of made) {
    panel.canvas = element("canvas", { class: "plot" });
    panel.cursor = element("div", { class: "cursor" });
    panel.value = element("span", { class: "value" });
    const title = element("p", {}, element("span", {}, panel.title), panel.value);
    panel.node = element("div", { class: "panel" }, title, panel.canvas, panel.cursor);
    dragging(panel.canvas, LEFT);
  }
  panels = made;
  at("wide").replaceChildren(...made.filter((p) => p.wide).map((p) => p.node));
  at("panels").replaceChildren(...made.filter((p) => !p.wide).map((p) => p.node));
  showLegend();
}

function showLegend() {
  const e = state.episode;
  const present = [...new Set(e.actors.map((run) => run[2]))];
  const parts = present.map((name) => {
    const patch = element("span", { class: "swatch" });
    patch.style.background = colour(ACTORS[name]);
    return [patch, name];
  });
  const lines = [["state", "state"], ["action", "action", "dashed"]];
  if (e.gaps.length) lines.push(["bad", "gap"]);
  for (const [name, text, more] of lines) {
    const patch = element("span", { class: `swatch line ${more || ""}` });
    patch.style.borderColor = colour(name);
    parts.push([patch, text]);
  }
  at("legend").replaceChildren(...parts.flat());
}

const LEFT = 50; // pixels of a panel's numbers
const place = (tick, width, left) => left + ((tick + 0.5) / state.episode.length) * (width - left);

function surface(canvas) {
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const c = canvas.getContext("2d");
  c.scale(scale, scale);
  return [c, width, height];
}

function drawPlots() {
  if (!state.episode) return;
  drawStrip();
  panels.forEach(drawPanel);
  moveCursors();
}

function drawStrip() {
  const [c, width, height] = surface(at("strip"));
  const n = state.episode.length;
  for (const [first, past, actor] of state.episode.actors) {
    c.fillStyle = colour(ACTORS[actor]);
    c.fillRect((first / n) * width, 0, Math.max(1, ((past - first) / n) * width), height);
  }
  c.fillStyle = colour("bad");
  for (const [tick] of state.episode.gaps) c.fillRect((tick / n) * width - 1, 0, 2, height);
}

function limits(panel) {
  let low = Infinity, high = -Infinity;
  const see = (v) => {
    if (v !== null && v < low) low = v;
    if (v !== null && v > high) high = v;
  };
  for (const line of panel.lines) line.values.forEach(see);
  for (const band of panel.bands ?? []) [...band.low, ...band.high].forEach(see);
  if (panel.lines.some((line) => line.bars)) see(0);
  if (low === Infinity) [low, high] = [0, 1];
  const least = 1e-3 * Math.max(Math.abs(low), Math.abs(high), 1e-6); // a line of noise stays a line
  const margin = Math.max((high - low) * 0.08, least);
  return [low - margin, high + margin];
}

function drawPanel(panel) {
  const [c, width, height] = surface(panel.canvas);
  const [low, high] = limits(panel);
  const y = (v) => height - 2 - ((v - low) / (high - low)) * (height - 4);
  const x = (tick) => place(tick, width, LEFT);
  for (const [first, past, actor] of state.episode.actors) {
    if (!TINT[actor]) continue;
    c.globalAlpha = 0.22;
    c.fillStyle = colour(TINT[actor]);
    c.fillRect(x(first - 0.5), 0, x(past - 0.5) - x(first - 0.5), height);
  }
  c.globalAlpha = 1;
  c.strokeStyle = colour("line");
  c.strokeRect(LEFT + 0.5, 0.5, width - LEFT - 1, height - 1);
  c.fillStyle = colour("soft");
  c.font = "11px system-ui, sans-serif";
  c.textAlign = "right";
  c.fillText(number(high, 2), LEFT - 5, 10);
  c.fillText(number(low, 2), LEFT - 5, height - 3);
  c.strokeStyle = colour("bad");
  c.setLineDash([2, 2]);
  for (const [tick] of state.episode.gaps) stroke(c, [[x(tick - 0.5), 0], [x(tick - 0.5), height]]);
  c.setLineDash([]);
  for (const band of panel.bands ?? []) {
    const { ticks } = band;
    const edge = ticks.map((t, i) => [x(t), y(band.high[i] ?? 0)]);
    edge.push(...ticks.map((t, i) => [x(t), y(band.low[i] ?? 0)]).reverse());
    c.globalAlpha = 0.25;
    c.fillStyle = colour(band.colour);
    c.beginPath();
    edge.forEach(([a, b]) => c.lineTo(a, b));
    c.fill();
    c.globalAlpha = 1;
  }
  for (const line of panel.lines) {
    c.strokeStyle = c.fillStyle = colour(line.colour);
    c.lineWidth = 1.5;
    c.setLineDash(line.dash ? [4, 3] : []);
    const points = line.ticks.map((t, i) => [x(t), line.values[i] === null ? null : y(line.values[i])]);
    if (line.bars) {
      const wide = Math.max(1.5, (width - LEFT) / state.episode.length);
      points.forEach(([a, b], i) => {
        if (line.values[i]) c.fillRect(a - wide / 2, Math.min(b, y(0)), wide, Math.max(1, Math.abs(b - y(0))));
      });
      stroke(c, [[LEFT, y(0)], [width, y(0)]], 0.4);
      continue;
    }
    stroke(c, points);
    if (line.dots && points.length < 200) points.forEach(([a, b]) => b !== null && c.fillRect(a - 1.5, b - 1.5, 3, 3));
  }
  c.setLineDash([]);
}

function stroke(c, points, alpha = 1) {
  c.globalAlpha = alpha;
  c.beginPath();
  let begun = false;
  for (const [a, b] of points) {
    if (b === null) begun = false;
    else if (begun) c.lineTo(a, b);
    else c.moveTo(a, b);
    begun = b !== null;
  }
  c.stroke();
  c.globalAlpha = 1;
}

function newest(ticks, tick) { // index of the last entry at `tick` or before, -1 where there is none
  let low = 0, high = ticks.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ticks[middle] <= tick) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

function moveCursors() {
  for (const panel of panels) {
    const width = panel.canvas.clientWidth;
    panel.cursor.style.left = `${place(state.tick, width, LEFT)}px`;
    panel.cursor.style.height = `${panel.canvas.clientHeight}px`;
    panel.value.textContent = panel.lines
      .map((line) => number(line.values[newest(line.ticks, state.tick)] ?? null))
      .join(" / ");
  }
}

// ---- time

function seek(tick) {
  const e = state.episode;
  if (!e) return;
  state.tick = Math.min(Math.max(Math.round(tick), 0), e.length - 1);
  at("tick").value = state.tick;
  const seconds = e.hz ? `, ${(state.tick / e.hz).toFixed(2)} s` : "";
  const run = e.actors.find(([first, past]) => first <= state.tick && state.tick < past);
  at("time").textContent = `tick ${state.tick} of ${e.length}${seconds}, ${run ? run[2] : ""}`;
  for (const camera of e.cameras) {
    camera.view.figure.className = run && run[2] === "human" ? "human" : "";
    showFrame(camera);
  }
  moveCursors();
}

async function showFrame(camera) {
  const { view } = camera;
  const i = Math.max(0, newest(camera.ticks, state.tick));
  const n = state.chosen;
  if (!camera.ticks.length || view.wanted === i) return;
  view.wanted = i;
  if (view.busy) return; // the newest one is loaded when this one is there
  view.busy = true;
  while (view.shown !== view.wanted && state.chosen === n) {
    const next = view.wanted;
    const address = data.frame(n, camera, next);
    const image = new Image();
    image.src = address;
    try {
      await image.decode();
      view.image.src = address;
      view.figure.lastChild.textContent = `${camera.name}, frame of tick ${camera.ticks[next]}`;
    } catch {
      view.figure.lastChild.textContent = `${camera.name}: the frame of tick ${camera.ticks[next]} cannot be read`;
    }
    view.shown = next;
  }
  view.busy = false;
}

let started = null; // [time, tick] at which playing began

function play() {
  const e = state.episode;
  if (!e) return;
  if (state.tick >= e.length - 1) seek(0);
  state.playing = true;
  at("play").textContent = "\u275a\u275a";
  started = [performance.now(), state.tick];
  requestAnimationFrame(advance);
}

function pause() {
  state.playing = false;
  at("play").textContent = "\u25b6";
}

function advance(now) {
  const e = state.episode;
  if (!state.playing || !e) return;
  const rate = (e.hz || 10) * Number(at("speed").value);
  seek(Math.floor(started[1] + ((now - started[0]) / 1000) * rate));
  if (state.tick >= e.length - 1) pause();
  else requestAnimationFrame(advance);
}

function jump(tick) {
  seek(tick);
  if (state.playing) started = [performance.now(), state.tick];
}

function dragging(node, left) {
  const move = (event) => {
    const box = node.getBoundingClientRect();
    const share = (event.clientX - box.left - left) / (box.width - left);
    jump(Math.floor(share * state.episode.length));
  };
  node.onpointerdown = (event) => {
    node.setPointerCapture(event.pointerId);
    move(event);
  };
  node.onpointermove = (event) => event.buttons && move(event);
}

// ---- keys and start

const KEYS = {
  ArrowUp: () => neighbour(-1),
  ArrowDown: () => neighbour(1),
  ArrowLeft: (event) => jump(state.tick - (event.shiftKey ? 10 : 1)),
  ArrowRight: (event) => jump(state.tick + (event.shiftKey ? 10 : 1)),
  Home: () => jump(0),
  End: () => state.episode && jump(state.episode.length - 1),
  " ": () => (state.playing ? pause() : play()),
  "/": () => at("filters").elements.text.focus(),
  s: () => label("success"),
  f: () => label("failure"),
  u: () => label(""),
  Backspace: () => label("discard"),
};

function onKey(event) {
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  const { target } = event;
  const typing = target.matches("select, input:not([type=range])");
  if (typing) {
    if (event.key === "Escape") target.blur();
    return;
  }
  const act = KEYS[event.key];
  const repeats = event.repeat && !event.key.startsWith("Arrow");
  if (!act || repeats) return;
  event.preventDefault();
  act(event);
}

async function start() {
  state.info = await data.info();
  const { info } = state;
  const folder = info.path.split("/").filter(Boolean).pop() || info.path;
  document.title = `${folder}: episodes`;
  at("title").textContent = folder;
  at("title").title = info.path;
  at("summary").textContent = [`${info.format}, ${info.hz ? `${number(info.hz)} Hz` : "unknown rate"}`, info.left_out]
    .filter(Boolean)
    .join(". ");
  at("labelkeys").hidden = !data.label;
  at("notes").hidden = !info.notes.length;
  at("notes").querySelector("summary").textContent = `${info.notes.length} notes about these data`;
  at("notes").querySelector("ul").replaceChildren(...info.notes.map((text) => element("li", {}, text)));
  at("head").replaceChildren(
    ...COLUMNS.map(([name, text]) => {
      const button = element("button", { "data-name": name, type: "button" }, text, element("span"));
      button.onclick = () => {
        state.sort = [name, state.sort[0] === name ? -state.sort[1] : 1];
        updateList();
      };
      return button;
    }),
  );
  at("filters").oninput = updateList;
  at("filters").onsubmit = (event) => event.preventDefault();
  at("list").onscroll = drawRows;
  at("tick").oninput = () => jump(Number(at("tick").value));
  at("play").onclick = () => (state.playing ? pause() : play());
  at("speed").onchange = () => state.playing && (started = [performance.now(), state.tick]);
  for (const button of at("labels").querySelectorAll("button")) button.onclick = () => label(button.dataset.label);
  dragging(at("strip"), 0);
  document.addEventListener("keydown", onKey);
  window.addEventListener("resize", () => (drawRows(), drawPlots()));
  matchMedia("(prefers-color-scheme: dark)").onchange = () => state.episode && (showLegend(), drawPlots());
  const filling = fill();
  const key = location.hash.startsWith("#key=") ? decodeURIComponent(location.hash.slice(5)) : null; // of a run's page
  if (key) await filling;
  const found = state.rows.find((row) => row.key === key);
  if (key && !found) throw new Error("This episode is not listed yet: load this page again in a while.");
  const [n, tick] = found ? [found.number] : location.hash.slice(1).split("@").map(Number);
  const given = location.hash && Number.isInteger(n) && n >= 0 && n < info.total;
  const first = embedded ? Number(Object.keys(embedded.episodes)[0] || 0) : 0;
  await choose(given ? n : first, tick || 0);
  await filling;
}

start().catch((error) => {
  at("empty").textContent = error.message;
  at("empty").className = "fault";
});
