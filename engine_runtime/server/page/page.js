// Chat with the engine, and see what speculation does while it writes.

import { draw } from "./tree.js";
import { completion, headers } from "./stream.js";

const $ = (id) => document.getElementById(id);
const PARTS = ["queue", "prefill", "draft", "verify"];
const messages = [];
let model = null;
let running = null; // AbortController of the answer that is being written
let run = null; // figures of the last answer

function newRun() {
  return { traces: [], tokens: 0, offered: [], accepted: [], begin: performance.now(), first: null, timing: null, end: null };
}

// ---- the conversation ----

function addTurn(role, text) {
  $("hint")?.remove();
  const turn = document.createElement("div");
  turn.className = `turn ${role}`;
  turn.textContent = text;
  $("log").append(turn);
  return turn;
}

/** The places of an answer's reasoning and content. */
function addAnswer() {
  const turn = addTurn("assistant", "");
  const details = document.createElement("details");
  const summary = document.createElement("summary");
  summary.textContent = "Reasoning";
  const reasoning = document.createElement("div");
  details.append(summary, reasoning);
  details.hidden = true;
  details.open = true;
  const content = document.createElement("div");
  turn.append(details, content);
  return { turn, details, reasoning, content };
}

function scrollDown() {
  const log = $("log");
  if (log.scrollHeight - log.scrollTop - log.clientHeight < 120) log.scrollTop = log.scrollHeight;
}

async function answer() {
  const place = addAnswer();
  const message = { role: "assistant", content: "", reasoning_content: "" };
  running = new AbortController();
  run = newRun();
  $("step").value = $("step").max = 1;
  busy(true);
  const body = {
    model, messages: [...messages], stream: true, stream_options: { include_usage: true }, timing: true, trace: true,
    temperature: Number($("temperature").value), max_tokens: Number($("max").value),
    chat_template_kwargs: { thinking: $("thinking").checked },
  };
  try {
    for await (const chunk of completion(body, $("key").value, running.signal)) {
      take(chunk, message, place);
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      const line = document.createElement("p");
      line.className = "error";
      line.textContent = error.message;
      place.turn.append(line);
    }
  }
  run.end = performance.now();
  show();
  messages.push(message);
  running = null;
  busy(false);
}

function take(chunk, message, place) {
  const delta = chunk.choices?.[0]?.delta ?? {};
  if (delta.reasoning_content) {
    message.reasoning_content += delta.reasoning_content;
    place.details.hidden = false;
    place.reasoning.append(delta.reasoning_content);
  }
  if (delta.content) {
    if (!message.content) place.details.open = false;
    message.content += delta.content;
    place.content.append(delta.content);
  }
  if ((delta.content || delta.reasoning_content) && run.first === null) run.first = performance.now();
  if (chunk.k2_trace) takeTrace(chunk.k2_trace);
  if (chunk.usage) {
    run.timing = chunk.usage.timing ?? run.timing;
    run.tokens = chunk.usage.completion_tokens;
  }
  scrollDown();
  showSoon();
}

function takeTrace(trace) {
  run.traces.push(trace);
  run.tokens += trace.accepted.length;
  run.timing = trace.timing ?? run.timing;
  const depthOf = [];
  trace.parents.forEach((parent, index) => { depthOf[index] = parent < 0 ? 0 : depthOf[parent] + 1; });
  const deepest = Math.max(...depthOf);
  for (let depth = 1; depth <= deepest; depth += 1) {
    run.offered[depth] = (run.offered[depth] ?? 0) + 1;
    run.accepted[depth] = (run.accepted[depth] ?? 0) + (trace.accepted.length > depth ? 1 : 0);
  }
}

// ---- the figures ----

let scheduled = null;

/** Show the figures soon; many chunks may share one drawing. */
function showSoon() {
  scheduled ??= setTimeout(show, 50);
}

function show() {
  clearTimeout(scheduled);
  scheduled = null;
  const now = performance.now();
  const writing = ((run.end ?? now) - (run.first ?? now)) / 1000;
  $("rate").textContent = writing > 0.05 ? (run.tokens / writing).toFixed(0) : "–";
  $("first").textContent = run.first === null ? "–" : `${((run.first - run.begin) / 1000).toFixed(2)} s`;
  const passes = run.traces.length;
  const emitted = run.traces.reduce((sum, trace) => sum + trace.accepted.length, 0);
  $("passes").textContent = passes || "–";
  $("per-pass").textContent = passes ? (emitted / passes).toFixed(2) : "–";
  const slider = $("step");
  const follow = slider.disabled || Number(slider.value) >= Number(slider.max);
  slider.max = Math.max(1, passes);
  slider.disabled = passes === 0;
  if (follow) slider.value = slider.max;
  showStep();
  showHistory();
  showDepths();
  showSplit();
}

function showStep() {
  const number = Number($("step").value);
  const trace = run?.traces[number - 1];
  $("step-name").textContent = trace ? `step ${number} of ${run.traces.length}: ${trace.accepted.length} tokens` : "";
  if (trace) draw($("tree"), trace);
  else $("tree").replaceChildren();
}

function showHistory() {
  const counts = run.traces.slice(-80).map((trace) => trace.accepted.length);
  const most = Math.max(1, ...counts);
  $("history").replaceChildren(...counts.map((count) => {
    const bar = document.createElement("i");
    bar.style.height = `${(100 * count) / most}%`;
    return bar;
  }));
}

function showDepths() {
  const rows = [];
  for (let depth = 1; depth < run.offered.length; depth += 1) {
    const row = document.createElement("tr");
    for (const value of [depth, run.offered[depth], run.accepted[depth]]) {
      row.append(Object.assign(document.createElement("td"), { textContent: value }));
    }
    const cell = document.createElement("td");
    cell.append(Object.assign(document.createElement("meter"), { max: run.offered[depth], value: run.accepted[depth] }));
    row.append(cell);
    rows.push(row);
  }
  $("depths").tBodies[0].replaceChildren(...rows);
}

function showSplit() {
  const timing = run.timing;
  const seconds = PARTS.map((part) => timing?.[`${part}_seconds`] ?? 0);
  const total = seconds.reduce((a, b) => a + b, 0);
  $("split").replaceChildren(...PARTS.map((part, index) => {
    const bar = document.createElement("i");
    bar.className = part;
    bar.style.width = `${total ? (100 * seconds[index]) / total : 0}%`;
    return bar;
  }));
  $("split-text").textContent = total
    ? PARTS.map((part, index) => `${part} ${(seconds[index] * 1000).toFixed(0)} ms`).join(" · ") : "";
}

// ---- controls ----

function busy(is) {
  $("send").hidden = is;
  $("stop").hidden = !is;
  if (!is) $("input").focus();
}

async function submit(event) {
  event?.preventDefault();
  const text = $("input").value;
  if (running || !text.trim()) return;
  $("input").value = "";
  messages.push({ role: "user", content: text });
  addTurn("user", text);
  scrollDown();
  await answer();
}

function exportConversation() {
  const data = JSON.stringify({ model, messages, traces: run?.traces ?? [] }, null, 1);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([data], { type: "application/json" }));
  link.download = "conversation.json";
  link.click();
  URL.revokeObjectURL(link.href);
}

async function watch() {
  try {
    const health = await (await fetch("health")).json();
    const ready = health.state === "ready";
    const loading = health.progress === 1 ? "" : ` ${Math.round(health.progress * 100)} %`;
    $("state").textContent = ready ? "ready" : `${health.state}${loading}`;
    $("state").className = `pill ${ready ? "ready" : "down"}`;
    if (model === null) {
      const response = await fetch("v1/models", { headers: headers($("key").value) });
      if (response.ok) {
        model = (await response.json()).data[0].id;
        $("model").textContent = model;
      } else {
        $("model").textContent = response.status === 401 ? "this server needs an API key (Settings)" : "";
      }
    }
  } catch {
    $("state").textContent = "not reachable";
    $("state").className = "pill down";
  }
  setTimeout(watch, model === null ? 1000 : 5000);
}

$("form").addEventListener("submit", submit);
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
});
$("stop").addEventListener("click", () => running?.abort());
$("step").addEventListener("input", showStep);
$("export").addEventListener("click", exportConversation);
$("clear").addEventListener("click", () => {
  running?.abort();
  messages.length = 0;
  for (const turn of document.querySelectorAll(".turn")) turn.remove();
});
watch();
