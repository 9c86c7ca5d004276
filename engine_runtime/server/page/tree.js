// Draws the draft tree of one step: depth downwards, branches to the right, the accepted path highlighted.

const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT, GAP_X, GAP_Y, CHARS] = [84, 19, 8, 12, 11];

/** A token's text with its blanks made visible, cut to what fits into a node. */
export function visible(text) {
  const shown = text.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "→");
  return shown.length > CHARS ? shown.slice(0, CHARS - 1) + "…" : shown || "∅";
}

function element(name, attributes, parent) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  parent.append(made);
  return made;
}

/** The step's rows and its bonus token as nodes {text, parent, kind, probability}; kind: accepted, rejected, bonus. */
export function nodesOf(trace) {
  const accepted = new Set(trace.accepted);
  const nodes = trace.texts.map((text, index) => ({
    text, parent: trace.parents[index], probability: trace.probabilities[index],
    kind: accepted.has(index) ? "accepted" : "rejected",
  }));
  nodes.push({ text: trace.bonus_text, parent: trace.accepted.at(-1), probability: null, kind: "bonus" });
  return nodes;
}

/** Gives every node its depth and its column: a leaf has one of its own, a parent stands above its first child. */
function place(nodes) {
  const children = nodes.map(() => []);
  nodes.forEach((node, index) => { if (node.parent >= 0) children[node.parent].push(index); });
  const order = { accepted: 0, bonus: 1, rejected: 2 };
  for (const list of children) list.sort((a, b) => order[nodes[a].kind] - order[nodes[b].kind]);
  let columns = 0;
  const visit = (index, depth) => {
    nodes[index].depth = depth;
    nodes[index].column = columns;
    children[index].forEach((child, position) => {
      if (position > 0) columns += 1;
      visit(child, depth + 1);
    });
  };
  visit(0, 0);
  return columns + 1;
}

export function draw(container, trace) {
  const nodes = nodesOf(trace);
  const columns = place(nodes);
  const depth = Math.max(...nodes.map((node) => node.depth));
  const [width, height] = [columns * (WIDTH + GAP_X), (depth + 1) * (HEIGHT + GAP_Y)];
  container.replaceChildren();
  const svg = element("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" }, container);
  element("title", {}, svg).textContent =
    `${trace.accepted.length} of ${trace.texts.length} rows accepted: ${trace.accepted.map((i) => trace.texts[i]).join("")}`;
  const at = (node) => [node.column * (WIDTH + GAP_X) + 1, node.depth * (HEIGHT + GAP_Y) + 1];
  for (const node of nodes) {
    if (node.parent < 0) continue;
    const [[x, y], [px, py]] = [at(node), at(nodes[node.parent])];
    const [from, to] = [px + WIDTH / 2, x + WIDTH / 2];
    const curve = `M${from} ${py + HEIGHT} C${from} ${y - 1} ${to} ${py + HEIGHT + 1} ${to} ${y}`;
    element("path", { d: curve, class: node.kind }, svg);
  }
  for (const node of nodes) {
    const [x, y] = at(node);
    const group = element("g", { class: node.kind, transform: `translate(${x} ${y})` }, svg);
    element("rect", { width: WIDTH, height: HEIGHT, rx: 5 }, group);
    element("text", { x: 7, y: 14 }, group).textContent = visible(node.text);
    const chance = node.probability === null ? "drawn by the model" : `path probability ${(node.probability * 100).toFixed(1)} %`;
    element("title", {}, group).textContent = `${JSON.stringify(node.text)}: ${chance}`;
  }
}
