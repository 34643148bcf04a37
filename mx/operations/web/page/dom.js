// Elements whose contents change only where they differ. Texts are texts: nothing here makes markup
// of them, and the page's policy would refuse it.

const SVG = "http://www.w3.org/2000/svg";

export function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

export function svg(tag, className) {
  const made = document.createElementNS(SVG, tag);
  if (className) made.setAttribute("class", className);
  return made;
}

export function text(node, value) {
  if (node.textContent !== value) node.textContent = value;
}

export function attribute(node, name, value) {
  const known = node.getAttribute(name);
  if (value === null) {
    if (known !== null) node.removeAttribute(name);
  } else if (known !== String(value)) {
    node.setAttribute(name, value);
  }
}

// Why a section shows nothing: there is nothing, or nothing that the filter finds.
export class Nothing {
  constructor(section, noun) {
    this.empty = section.querySelector(".empty");
    this.unmatched = section.querySelector(".unmatched");
    this.noun = noun;
  }

  show(shown, there, wanted) {
    this.empty.hidden = shown || there;
    this.unmatched.hidden = shown || !there;
    text(this.unmatched, `No ${this.noun} matches the filter “${wanted}”.`);
  }
}

// A bar with a mark for each layer, or group of layers: all of it, a part, nothing. Two paths, however
// many layers there are.
export class Strip {
  constructor(label) {
    this.label = label;
    this.marks = null;
    this.node = svg("svg", "strip");
    this.node.setAttribute("preserveAspectRatio", "none");
    this.part = svg("path", "part");
    this.full = svg("path", "full");
    this.node.append(this.part, this.full);
    this.node.setAttribute("role", "progressbar");
    this.node.setAttribute("aria-label", label);
    this.node.setAttribute("aria-valuemin", "0");
  }

  show(marks, ready, layers) {
    attribute(this.node, "aria-valuemax", Math.max(1, layers));
    attribute(this.node, "aria-valuenow", ready);
    attribute(this.node, "aria-valuetext", `${ready} of ${layers} layers`);
    if (marks === this.marks) return;
    this.marks = marks;
    const gap = marks.length <= 64 ? marks.length / 300 : 0; // about two pixels
    let full = "";
    let part = "";
    for (let at = 0; at < marks.length; at += 1) {
      const share = marks.charCodeAt(at) - 48;
      const x = at + gap / 2;
      const width = 1 - gap;
      if (share >= 9) full += `M${x} 0h${width}v9h-${width}z`;
      else if (share > 0) part += `M${x} ${9 - share}h${width}v${share}h-${width}z`;
    }
    attribute(this.node, "viewBox", `0 0 ${Math.max(1, marks.length)} 9`);
    attribute(this.full, "d", full || null);
    attribute(this.part, "d", part || null);
  }
}
