"use strict";
/* The page of a running actor. The server sends an event ten times a second; keys and buttons go back one by one. */

const at = (id) => document.getElementById(id);
const me = [...crypto.getRandomValues(new Uint8Array(12))].map((b) => b.toString(16).padStart(2, "0")).join("");
const SECONDS = 10; // that the plot of Q shows
const JOINT_SECONDS = 2; // that those of joints show, so that a chunk is seen
const SILENCE = 1000; // ms without an event after which what is shown is old
const WAITED = 1000; // ms that a key may wait for the one before it
const CONFIRMS = 500; // ms for the actor to answer a stop
const LISTED = 8; // episodes, the newest first
const AVERAGED = 20; // over which success is
const CLICK = 5; // pixels that a pointer may move in one
const state = {
  info: null, event: null, at: 0, ended: false, control: null, word: "",
  ticks: [], plans: new Map(), plan: null, cameras: new Map(), episodes: [], rang: "", unanswered: false,
};

function element(tag, attributes = {}, ...content) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else made.setAttribute(name, value);
  }
  made.append(...content);
  return made;
}

// ---- requests

async function post(what, body = {}) {
  const response = await fetch(`${what}/${me}`, {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
  });
  const answer = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(answer.error || `the actor answered ${response.status}`);
  return answer;
}

async function request(what, body) {
  try {
    showControl(await post(what, body));
    notice("");
  } catch (error) {
    notice(error instanceof TypeError ? "No connection: use the keys at the robot." : error.message);
  }
}

async function requestStop(body) {
  const late = setTimeout(() => unanswered(true), CONFIRMS);
  try {
    showControl(await post("press", body));
    unanswered(false);
  } catch {
    unanswered(true);
  } finally {
    clearTimeout(late);
  }
}

function unanswered(now) {
  state.unanswered = now; // else the actor says whether the robot confirmed it
  showAlarm(state.event ? state.event.state.alarm : "");
}

function showAlarm(text) {
  setText(at("alarm"), state.unanswered ? state.info.unconfirmed : text);
}

let chain = Promise.resolve();

function press(key) {
  const { proposed = null, robot = null } = state.event ? state.event.state : {}; // as they are shown now
  const seen = state.event ? state.event.now : 0;
  const body = { key, word: state.word, seen, proposed: proposed && proposed[0], robot };
  if (state.info && state.info.stops.includes(key)) return requestStop(body); // waits for nothing
  const pressed = performance.now();
  chain = chain.then(() => {
    if (performance.now() - pressed < WAITED) return request("press", body);
    return notice("The connection is slow: nothing was done.");
  });
  return chain;
}

function notice(text) {
  at("notice").textContent = text;
}

// ---- keys: on the whole page, so that space and Enter never press a button that has the focus

const NAMES = { " ": "space", Enter: "enter", Escape: "escape", Backspace: "backspace" };

function keyOf(event) {
  if (event.ctrlKey || event.altKey || event.metaKey || event.isComposing) return null;
  return NAMES[event.key] || (event.key.length === 1 ? event.key.toLowerCase() : null);
}

window.addEventListener("keydown", (event) => {
  const key = keyOf(event);
  if (!state.info || key === null || !(key in state.info.keys || key === "space" || key === "enter")) return;
  event.preventDefault();
  event.stopPropagation();
  if (!event.repeat && key in state.info.keys) press(key);
}, true);

for (const name of ["keyup", "keypress"]) {
  window.addEventListener(name, (event) => {
    if (event.key === " " || event.key === "Enter") {
      event.preventDefault();
      event.stopPropagation();
    }
  }, true);
}

function button(made, action) {
  made.addEventListener("mousedown", (event) => event.preventDefault()); // it takes no focus
  made.addEventListener("click", action);
  return made;
}

// ---- the state

const LABELS = { go: "go on", reset_new: "reset, new object" };

function begin(info) {
  state.info = info;
  document.title = info.title;
  at("title").textContent = info.title;
  at("buttons").replaceChildren(
    ...info.buttons.map(({ action, key, keys, meaning }) =>
      button(
        element("button", { "data-action": action, tabindex: "-1", title: meaning }, LABELS[action] || action,
          element("kbd", {}, keys.join(" or "))),
        () => press(key),
      ),
    ),
  );
  at("joints").replaceChildren(
    ...info.names.map((name, i) =>
      element("div", {}, element("p", { class: "label" }, element("span", {}, name), element("span", { id: `v${i}` })),
        element("canvas", { id: `j${i}` })),
    ),
  );
  legend();
  showControl(null);
}

function swatch(colour, text, line) {
  const made = element("span", { class: `swatch${line ? " line" : ""}` });
  made.style[line ? "borderColor" : "background"] = `var(--${colour})`;
  return [made, text];
}

function legend() {
  at("legend").replaceChildren(
    ...swatch("state", "Q, with the spread of the ensemble or of the candidates"), ...swatch("human", "intervention"),
    ...swatch("hold", "hold"), ...swatch("scripted", "script"), ...swatch("state", "joint, measured", true), ...swatch("action", "command", true),
    ...swatch("plan", "planned chunk", true),
  );
}

function showControl(control) {
  if (control) state.control = control;
  const c = state.control;
  at("take").hidden = !c || c.mine;
  at("release").hidden = !c || !c.mine;
  at("take").disabled = Boolean(c && c.holder !== null && !c.mine);
  if (c) {
    const holder = c.mine ? "you have control" : c.holder === null ? "no viewer has control" : `viewer ${c.holder} has control`;
    at("control").textContent = `${c.viewers} ${c.viewers === 1 ? "viewer" : "viewers"}; you are viewer ${c.you ?? "?"}: ${holder}`;
  }
  const shown = state.event ? state.event.state : null;
  for (const made of at("buttons").children) {
    const action = made.dataset.action;
    const stops = action === "stop" || action === "hold";
    const effective = shown !== null && (shown.effective.includes(action) || shown.question !== "");
    made.disabled = !stops && !(effective && c && c.mine);
  }
  at("question").textContent = (shown && shown.question) || "";
}

function setText(made, text) {
  if (made.textContent !== text) made.textContent = text;
}

function showState(shown) {
  state.word = shown.word;
  const banner = at("banner");
  banner.className = shown.word.split(" ")[0];
  document.body.classList.remove("lost");
  setText(at("word"), shown.word);
  setText(at("countdown"), shown.countdown === null ? "" : `moves in ${shown.countdown} s`);
  showAlarm(shown.alarm);
  setText(at("held"), shown.held);
  setText(at("look"), shown.look);
  setText(at("progress"), shown.progress);
  at("obstacles").replaceChildren(
    ...shown.obstacles.map(([what, remedy]) => element("li", {}, element("b", {}, `${what}: `), remedy)),
  );
  const cells = at("cells");
  if (cells.children.length !== 2 * shown.cells.length)
    cells.replaceChildren(...shown.cells.flatMap(([name]) => [element("dt", {}, name), element("dd")]));
  shown.cells.forEach(([, value], i) => setText(cells.children[2 * i + 1], value));
  ring(shown);
}

function lost(text) {
  state.word = "";
  document.body.classList.add("lost");
  at("banner").className = "lost";
  setText(at("word"), text);
  setText(at("countdown"), "");
  setText(at("question"), "");
}

let sound = null;

function ring(shown) {
  const alarm = shown.alarm || (["STOPPED", "LEARNER LOST"].includes(shown.word) ? shown.word : "");
  const reason = `${shown.countdown ?? ""} ${alarm} ${shown.question} ${shown.look}`;
  const rings = reason !== state.rang && reason.trim() !== "";
  state.rang = reason;
  if (!rings || (navigator.userActivation && !navigator.userActivation.hasBeenActive)) return; // browsers refuse it
  try {
    sound = sound || new AudioContext();
    const tone = sound.createOscillator();
    tone.frequency.value = alarm ? 440 : 880;
    tone.connect(sound.destination);
    tone.start();
    tone.stop(sound.currentTime + 0.12);
  } catch {
    sound = null; // a browser without sound
  }
}

// ---- cameras

function showCameras(event) {
  for (const camera of event.cameras) {
    const shown = state.cameras.get(camera.name) || addCamera(camera);
    shown.camera = camera;
    if (camera.count !== shown.count && !shown.loading) {
      shown.loading = true;
      const { count, moment } = camera;
      const next = new Image();
      next.onload = () => {
        Object.assign(shown, { count, moment, loading: false });
        shown.picture.src = next.src;
      };
      next.onerror = () => { shown.loading = false; };
      next.src = `picture/${encodeURIComponent(camera.name)}/${count}`;
    }
    const age = shown.count ? event.now - (shown.count === camera.count ? camera.moment : shown.moment) : null;
    const resting = !event.inside && !state.info.served; // only the control loop reads it
    const told = resting ? "not read now" : age === null ? "no picture yet" : `${age.toFixed(2)} s old`;
    setText(shown.caption, `${camera.name}: ${told}`);
    shown.caption.className = !resting && (age === null || age > state.info.old) ? "old" : "";
    shown.figure.classList.toggle("resting", resting);
  }
}

function addCamera(camera) {
  const picture = element("img", {
    alt: `camera ${camera.name}`, width: camera.width, height: camera.height, draggable: "false",
    title: "click: larger or smaller; drag: a crop",
  });
  const box = element("i", { hidden: "" }), code = element("code"), caption = element("figcaption");
  const frame = element("div", { class: "picture" }, picture, box), figure = element("figure", {}, frame, caption, code);
  figure.style.setProperty("--ratio", camera.width / camera.height);
  at("cameras").append(figure);
  const shown = { figure, picture, caption, camera, count: 0, moment: 0, loading: false };
  state.cameras.set(camera.name, shown);
  let from = null, cropped = false; // where it was pressed, and whether there was a crop then
  const draw = ({ clientX, clientY }) => {
    const { left, top, width, height } = picture.getBoundingClientRect(), share = (v) => Math.min(1, Math.max(0, v));
    const xs = [from.clientX, clientX].map((x) => share((x - left) / width)).sort((a, b) => a - b);
    const ys = [from.clientY, clientY].map((y) => share((y - top) / height)).sort((a, b) => a - b);
    const clicked = Math.hypot(clientX - from.clientX, clientY - from.clientY) < CLICK;
    box.hidden = clicked;
    setText(code, clicked ? "" : cropLine(shown.camera, [xs[0], ys[0], xs[1], ys[1]]));
    const percent = (values) => values.map((v) => `${100 * v}%`);
    [box.style.left, box.style.top, box.style.right, box.style.bottom] = percent([xs[0], ys[0], 1 - xs[1], 1 - ys[1]]);
    return clicked;
  };
  frame.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    event.preventDefault();
    frame.setPointerCapture(event.pointerId);
    [from, cropped] = [event, !box.hidden];
  });
  frame.addEventListener("pointermove", (event) => from && draw(event));
  frame.addEventListener("pointerup", (event) => {
    if (from && draw(event) && !cropped) figure.classList.toggle("zoomed");
    from = null;
  });
  frame.addEventListener("pointercancel", () => (from = null));
  return shown;
}

function cropOf({ view, width, height }, [x0, y0, x1, y1]) {
  // The corners, as shares of the picture, in pixels of the device: before it was mirrored, turned and cut.
  const [x, y, w, h, rotate, flip] = view || [0, 0, width, height, 0, ""];
  if (flip === "horizontal") [x0, x1] = [1 - x1, 1 - x0];
  if (flip === "vertical") [y0, y1] = [1 - y1, 1 - y0];
  for (let turned = 0; turned < rotate; turned += 90) [x0, y0, x1, y1] = [y0, 1 - x1, y1, 1 - x0];
  const left = Math.min(Math.round(x0 * w), w - 1), top = Math.min(Math.round(y0 * h), h - 1);
  return [x + left, y + top, Math.max(1, Math.round(x1 * w) - left), Math.max(1, Math.round(y1 * h) - top)];
}

function cropLine(camera, corners) {
  const [x, y, width, height] = cropOf(camera, corners);
  if (!state.info.served) return `img[${y}:${y + height}, ${x}:${x + width}]`; // as HIL-SERL's IMAGE_CROP
  return camera.view ? `crop = [${x}, ${y}, ${width}, ${height}]` : "its robot server does not report its crop";
}

// ---- episodes

function showEpisodes() {
  at("episodes").replaceChildren(
    ...state.episodes.slice(-LISTED).reverse().map(([number, outcome, by, ticks, human, discarded]) =>
      element("tr", {}, ...[number, `${outcome} by ${by}`, `${(ticks / state.info.hz).toFixed(1)} s`,
        `human ${Math.round((100 * human) / ticks)} %`].map((text, i) =>
        element("td", { class: i === 1 ? (discarded ? "discarded" : outcome) : "" }, text))),
    ),
  );
}

function drawHistory(colours) {
  const { draw, width, height } = canvas("history"), kept = state.episodes.filter((row) => !row[5]);
  const success = kept.map((row) => row[1] === "success"), bar = width / Math.max(kept.length, AVERAGED);
  const shares = success.map((_, i) => {
    const last = success.slice(Math.max(0, i + 1 - AVERAGED), i + 1);
    return last.filter(Boolean).length / last.length;
  });
  draw.globalAlpha = 0.35;
  kept.forEach(([, outcome], i) => {
    draw.fillStyle = { success: colours.plan, failure: colours.bad }[outcome] || colours.soft;
    draw.fillRect(i * bar, 0, bar - 1, height);
  });
  draw.globalAlpha = 1;
  line(draw, shares.map((v, i) => [(i + 0.5) * bar, 2 + (1 - v) * (height - 4)]), colours.state, 2);
  setText(at("success"), kept.length ? `${Math.round(100 * shares.at(-1))} % of ${Math.min(kept.length, AVERAGED)}` : "-");
}

// ---- plots

const number = (value) => (value === null || value === undefined ? "" : String(Number(value.toPrecision(4))));
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function take(event) {
  const keep = SECONDS * state.info.hz;
  for (const [episode, tick, by, decided, measured, command] of event.ticks)
    state.ticks.push({ episode, tick, by, decided, measured, command });
  if (state.ticks.length > keep) state.ticks.splice(0, state.ticks.length - keep);
  for (const plan of event.plans) {
    state.plans.set(`${plan.episode}/${plan.tick}`, plan);
    state.plan = plan;
  }
  while (state.plans.size > 1000) state.plans.delete(state.plans.keys().next().value);
}

function canvas(id) {
  const made = at(id), ratio = window.devicePixelRatio || 1;
  const [width, height] = [made.clientWidth, made.clientHeight];
  if (made.width !== Math.round(width * ratio)) [made.width, made.height] = [Math.round(width * ratio), Math.round(height * ratio)];
  const draw = made.getContext("2d");
  draw.setTransform(ratio, 0, 0, ratio, 0, 0);
  draw.clearRect(0, 0, width, height);
  return { draw, width, height };
}

const MARKS = ["human", "hold", "scripted"];

function plot(id, ticks, seconds, ahead, colours) {
  const { draw, width, height } = canvas(id);
  const count = Math.max(Math.round(seconds * state.info.hz), 1), x0 = count - ticks.length;
  const left = 44, x = (i) => left + ((width - left) * (x0 + i)) / (count + ahead);
  for (let i = 0, start = 0; i < ticks.length; i++) {
    const { by, episode } = ticks[i], next = ticks[i + 1];
    if (next && next.by === by && next.episode === episode) continue;
    if (MARKS.includes(by)) {
      draw.fillStyle = colours[by];
      draw.fillRect(x(start), 0, x(i + 1) - x(start), height);
    }
    if (next && next.episode !== episode) {
      draw.fillStyle = colours.soft;
      draw.fillRect(x(i + 1), 0, 1, height);
    }
    start = i + 1;
  }
  return { draw, height, x };
}

function scale(values, { draw, height }, colours, least = 0) {
  let [low, high] = [Infinity, -Infinity];
  for (const v of values) if (v !== null && v !== undefined) [low, high] = [Math.min(low, v), Math.max(high, v)];
  if (low > high) return null;
  const middle = (low + high) / 2, half = Math.max((high - low) / 2, least / 2, 1e-6) * 1.1;
  [low, high] = [middle - half, middle + half];
  draw.fillStyle = colours.soft;
  draw.font = "10px system-ui";
  draw.fillText(number(high), 0, 10);
  draw.fillText(number(low), 0, height - 2);
  return (v) => height - (height * (v - low)) / (high - low);
}

function line(draw, points, stroke, width = 1.5) {
  draw.strokeStyle = stroke;
  draw.lineWidth = width;
  draw.beginPath();
  let pen = false;
  for (const [x, y] of points) {
    if (y === null) pen = false;
    else if (pen) draw.lineTo(x, y);
    else [draw.moveTo(x, y), (pen = true)];
  }
  draw.stroke();
}

function drawQ(colours) {
  const made = plot("q", state.ticks, SECONDS, 0, colours), { draw, x } = made;
  const of = state.ticks.map((t) => (t.decided < 0 ? null : state.plans.get(`${t.episode}/${t.decided}`) || null));
  const q = of.map((plan) => (plan && plan.q !== null ? plan.q : null));
  const band = of.map((plan) => {
    if (!plan || plan.q === null) return null;
    if (plan.q_spread !== null) return [plan.q - plan.q_spread, plan.q + plan.q_spread];
    return plan.low === null ? null : [Math.min(plan.low, plan.q), Math.max(plan.high, plan.q)];
  });
  const y = scale([...q, ...band.flatMap((b) => b || [])], made, colours, 0.1);
  const last = q.findLast((v) => v !== null);
  setText(at("q_value"), last === undefined ? "-" : number(last));
  if (!y) return;
  draw.fillStyle = colours.state;
  draw.globalAlpha = 0.25;
  band.forEach((b, i) => b && draw.fillRect(x(i), y(b[1]), x(1) - x(0) + 0.5, Math.max(1, y(b[0]) - y(b[1]))));
  draw.globalAlpha = 1;
  line(draw, q.flatMap((v, i) => [[x(i), v === null ? null : y(v)], [x(i + 1), v === null ? null : y(v)]]), colours.state, 2);
}

function planStart(ticks) {
  // The row of `ticks` at which the newest plan begins; it may lie behind the newest tick.
  const { plan } = state, newest = ticks.at(-1);
  if (!plan || !newest || plan.episode !== newest.episode) return null;
  return ticks.length - 1 + plan.tick - newest.tick;
}

function drawJoints(colours) {
  const { info, plan } = state, ticks = state.ticks.slice(-Math.round(JOINT_SECONDS * info.hz));
  const { proposed } = state.event.state; // which begins once it is approved
  const first = proposed ? ticks.length : planStart(ticks);
  const chunk = proposed ? proposed[1] : plan ? plan.chunk : [], ahead = chunk.length;
  info.names.forEach((_, i) => {
    const made = plot(`j${i}`, ticks, JOINT_SECONDS, ahead, colours), { draw, x } = made;
    const measured = ticks.map((t) => t.measured[i]), command = ticks.map((t) => t.command[i]);
    const planned = first === null ? [] : chunk.map((row) => row[i]);
    const y = scale([...measured, ...command, ...planned], made, colours, 0.02 * (info.high[i] - info.low[i]));
    const shown = measured.at(-1) ?? command.at(-1);
    setText(at(`v${i}`), number(shown));
    if (!y) return;
    const points = (values, from) => values.map((v, k) => [x(from + k), v === null ? null : y(v)]);
    line(draw, points(command, 0), colours.action, 1);
    line(draw, points(measured, 0), colours.state);
    if (planned.length) line(draw, points(planned, first).filter((_, k) => first + k >= 0), colours.plan, 2);
  });
}

function drawPlots() {
  const names = ["state", "action", "plan", "human", "hold", "scripted", "soft", "bad"];
  const colours = Object.fromEntries(names.map((name) => [name, colour(name)]));
  drawQ(colours);
  drawJoints(colours);
  drawHistory(colours);
}

// ---- events

function connect() {
  const events = new EventSource(`events/${me}`);
  events.onmessage = (message) => {
    const event = JSON.parse(message.data);
    state.event = event;
    state.at = performance.now();
    take(event);
    if (event.episodes) {
      state.episodes = event.episodes;
      showEpisodes();
    }
    showState(event.state);
    showControl(event.control);
    showCameras(event);
    if (!document.hidden) requestAnimationFrame(drawPlots);
  };
  events.addEventListener("end", () => {
    state.ended = true;
    events.close();
    lost("THE ACTOR HAS ENDED");
  });
  events.onerror = () => {
    if (events.readyState === EventSource.CLOSED && !state.ended) setTimeout(connect, 2000); // it was refused
  };
}

setInterval(() => {
  if (!state.ended && performance.now() - state.at > SILENCE) lost("NO CONNECTION");
}, 200);
setInterval(() => state.ended || post("here").then(showControl, () => {}), 1000);
button(at("take"), () => request("take"));
button(at("release"), () => request("release"));

fetch("info").then((response) => response.json()).then((info) => {
  begin(info);
  connect();
});
