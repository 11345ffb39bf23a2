"use strict";
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const state = { picture: "", key: "", view: "kept", most: 0, model: null, examples: [], found: {}, answers: {} };
let newest = 0; // the last selection asked for: what comes later than a newer one is thrown away

function make(tag, attributes = {}, ...children) {
  const node = tag === "svg" || tag === "rect" || tag === "mask" ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function say(text, wrong = false) {
  $("status").textContent = text;
  $("status").className = wrong ? "note wrong" : "note";
}

async function call(path, body) {
  const headers = { "Content-Type": "application/json" };
  if ($("token").value) headers.Authorization = `Bearer ${$("token").value}`;
  const answer = await fetch(path, body === undefined ? { headers } : { method: "POST", headers, body: JSON.stringify(body) });
  const found = await answer.json();
  if (answer.status === 401) $("gate").hidden = false;
  if (!answer.ok) throw Object.assign(new Error(found.error.message), { param: found.error.param });
  return found;
}

// JSON of a browser has no 1.0: all tokens are asked for as the method "full", never as a share.
const methods = () => [$("method").value, $("second").value].filter((name, at, all) => name && all.indexOf(name) === at);
const budget = () => Number($("keep").value);
const pruning = (method) => (method === "full" ? { method } : { method, keep: budget() });

// Pictures -----------------------------------------------------------------------------------------------------------

async function keyOf(text) {
  if (!crypto.subtle) return "";
  const bytes = new Uint8Array(await crypto.subtle.digest("SHA-256", new TextEncoder().encode(text)));
  return [...bytes.slice(0, 8)].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

async function take(picture, key) {
  Object.assign(state, { picture, key, found: {}, answers: {}, most: 0 });
  for (const button of $("examples").children) button.setAttribute("aria-pressed", String(button.dataset.key === key));
  await choose();
}

async function upload(file) {
  const reader = new FileReader();
  reader.onload = async () => {
    const key = `own-${await keyOf(reader.result)}`;
    await take(reader.result, key);
    if (state.key !== key || !state.picture) return;
    try { localStorage.setItem(key, reader.result); } catch { /* too large to be brought back by a link */ }
  };
  reader.onerror = () => say("the file cannot be read; choose another", true);
  reader.readAsDataURL(file);
}

// What is kept -------------------------------------------------------------------------------------------------------

async function choose() {
  const number = ++newest;
  if (!state.picture) return;
  remember();
  try {
    const found = {};
    for (const method of methods()) {
      const asked = state.most || method === "full" ? pruning(method) : { method };
      found[method] = await call("v1/diffprune/select", { image: state.picture, text: $("question").value, ...asked });
      if (number !== newest) return;
    }
    const first = Object.values(found)[0];
    if (!state.most) {
      state.most = first.num_visual;
      $("keep").max = String(first.num_visual);
      const wanted = Number(new URLSearchParams(location.hash.slice(1)).get("keep"));
      $("keep").value = String(wanted || (first.keep.length < first.num_visual ? first.keep.length : Math.ceil(first.num_visual / 9)));
      return choose();
    }
    state.found = found;
    state.answers = state.answers.of === asking() ? state.answers : {};
    say("");
  } catch (error) {
    if (number === newest && error.param === "image") state.picture = ""; // it cannot be shown either
    if (number === newest) say(error.message, true);
  }
  if (number === newest) draw();
}

const asking = () => JSON.stringify([state.key, $("question").value, budget(), methods()]);

function overlay(found, number) {
  const [width, height] = found.size;
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  const boxes = found.boxes || [];
  const rectangle = (box, more) => make("rect", { x: box[0], y: box[1], width: box[2] - box[0], height: box[3] - box[1], ...more });
  if (state.view === "kept") {
    const mask = make("mask", { id: `mask-${number}` }, make("rect", { width, height, fill: "#fff" }));
    for (const index of found.keep) if (boxes[index]) mask.append(rectangle(boxes[index], { fill: "#000", class: "lit" }));
    svg.append(mask, make("rect", { width, height, class: "veil", mask: `url(#mask-${number})` }));
  } else if (state.view === "heat" && found.logits) {
    const order = found.logits.map((value, index) => [value, index]).sort((a, b) => a[0] - b[0]);
    order.forEach(([, index], rank) => {
      const share = order.length > 1 ? rank / (order.length - 1) : 1;
      const colour = `hsl(${Math.round(250 - 210 * share)} 85% ${Math.round(30 + 30 * share)}%)`;
      if (boxes[index]) svg.append(rectangle(boxes[index], { fill: colour, "fill-opacity": ".62", class: "heat" }));
    });
  }
  return svg;
}

function card(method, number) {
  const found = state.found[method];
  const picture = make("div", { class: "picture" });
  const image = make("img", { src: state.picture, alt: `The picture, ${found ? found.keep.length : "all"} tokens kept by ${method}` });
  if (found && Math.max(...found.size) < 400) image.className = "small";
  picture.append(image);
  if (found && method !== "full") picture.append(overlay(found, number));
  const text = make("div", { class: "text" }, make("h2", {}, method === "full" ? "full, nothing dropped" : method));
  if (found) text.append(make("p", { class: "count" }, `${found.keep.length} of ${found.num_visual} tokens`));
  if (found && state.view === "heat" && !found.logits && method !== "full") text.append(make("p", { class: "count" }, "This method ranks nothing, so there are no scores."));
  const said = state.answers[method];
  if (said) text.append(make("p", { class: "answer" }, said.text || "(nothing)"));
  return make("article", { class: "card", "data-method": method }, picture, text);
}

function draw() {
  $("kept").textContent = state.most ? `${budget()} of ${state.most}` : "0";
  for (const button of $("views").children) button.setAttribute("aria-pressed", String(button.dataset.view === state.view));
  const shown = state.picture ? methods() : [];
  if (state.answers.full && !shown.includes("full")) shown.unshift("full");
  $("cards").replaceChildren(...shown.map(card));
  const rows = shown.filter((method) => state.answers[method]).map((method) => {
    const { usage, diffprune: took } = state.answers[method];
    const full = state.answers.full;
    const saved = full && method !== "full" ? (full.diffprune.total_ms - took.total_ms).toFixed(0) : "";
    const cells = [method, `${usage.visual_tokens_kept} of ${usage.visual_tokens}`, usage.prompt_tokens, took.first_token_ms.toFixed(0), took.total_ms.toFixed(0), saved];
    return make("tr", {}, ...cells.map((cell) => make("td", {}, String(cell))));
  });
  $("numbers").hidden = rows.length === 0;
  $("numbers").tBodies[0].replaceChildren(...rows);
}

// Answers ------------------------------------------------------------------------------------------------------------

async function ask() {
  if (!state.picture || !$("question").value.trim()) return say("choose a picture and write a question", true);
  const content = [{ type: "image_url", image_url: { url: state.picture } }, { type: "text", text: $("question").value }];
  const of = asking();
  $("ask").disabled = true;
  try {
    state.answers = { of };
    for (const method of ["full", ...methods().filter((name) => name !== "full")]) {
      say(`asking with ${method === "full" ? "all tokens" : method}`);
      const body = { model: state.model.id, messages: [{ role: "user", content }], max_tokens: Math.min(64, state.model.diffprune.max_new_tokens), diffprune: pruning(method) };
      const found = await call("v1/chat/completions", body);
      if (of !== asking()) return say("the question has changed; ask again");
      state.answers[method] = { text: found.choices[0].message.content, usage: found.usage, diffprune: found.diffprune };
      draw();
    }
    say("answered");
  } catch (error) {
    say(error.message, true);
  } finally {
    $("ask").disabled = false;
  }
}

// The view as a link -------------------------------------------------------------------------------------------------

function remember() {
  const kept = { picture: state.key, question: $("question").value, keep: state.most ? $("keep").value : "", method: $("method").value, second: $("second").value, view: state.view };
  const told = new URLSearchParams(Object.entries(kept).filter(([, value]) => value));
  if (state.most) history.replaceState(null, "", `#${told}`);
}

async function recall() {
  const told = new URLSearchParams(location.hash.slice(1));
  const names = state.model.diffprune.selectable;
  if (names.includes(told.get("method"))) $("method").value = told.get("method");
  if (names.includes(told.get("second"))) $("second").value = told.get("second");
  if (["kept", "heat", "plain"].includes(told.get("view"))) state.view = told.get("view");
  const key = told.get("picture") || "";
  const example = state.examples.find((one) => one.name === key) || state.examples[0];
  const own = key.startsWith("own-") ? localStorage.getItem(key) : null;
  $("question").value = told.get("question") ?? example.question;
  await (own ? take(own, key) : take(example.image, example.name));
}

async function start() {
  try {
    state.model = (await call("v1/models")).data[0];
    state.examples = (await call("v1/diffprune/examples")).data;
  } catch (error) {
    return say(error.message, true);
  }
  $("model").textContent = state.model.id;
  const names = state.model.diffprune.selectable;
  $("method").replaceChildren(...names.map((name) => make("option", { value: name }, name)));
  $("second").replaceChildren(make("option", { value: "" }, "nothing"), ...names.map((name) => make("option", { value: name }, name)));
  if (names[0] === "full" && names.includes("divprune")) $("method").value = "divprune";
  $("examples").replaceChildren(...state.examples.map(({ name, image, question }) => {
    const button = make("button", { type: "button", "data-key": name, "aria-pressed": "false", "aria-label": `Example: ${name}` }, make("img", { src: image, alt: "" }));
    button.addEventListener("click", () => { $("question").value = question; $("file").value = ""; take(image, name); });
    return button;
  }));
  await recall();
}

let waiting = 0;
function soon() {
  draw();
  clearTimeout(waiting);
  waiting = setTimeout(choose, 60);
}

$("keep").addEventListener("input", soon);
for (const id of ["method", "second"]) $(id).addEventListener("change", choose);
$("question").addEventListener("change", choose);
$("file").addEventListener("change", () => $("file").files[0] && upload($("file").files[0]));
for (const button of $("views").children) button.addEventListener("click", () => { state.view = button.dataset.view; remember(); draw(); });
$("form").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
$("token").addEventListener("change", () => { $("gate").hidden = true; state.model ? choose() : start(); });
$("link").addEventListener("click", async () => {
  remember();
  try {
    await navigator.clipboard.writeText(location.href);
    say("the link is copied; a picture of your own comes back in this browser alone");
  } catch {
    say("the address of this page is the link");
  }
});
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => { event.preventDefault(); if (event.dataTransfer.files[0]) upload(event.dataTransfer.files[0]); });
start();
