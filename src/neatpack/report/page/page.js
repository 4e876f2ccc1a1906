// What every page needs: its data, elements made without markup, numbers in words, colours of the theme.
const DATA = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "width" || name === "height") made.style[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

const whole = new Intl.NumberFormat("en-US");
// Digits up to ten thousand, then thousands, millions and so on.
const shortened = new Intl.NumberFormat("en-US", { notation: "compact", maximumSignificantDigits: 3 });
const compact = { format: (count) => (count < 10000 ? whole : shortened).format(count) };
const plural = (count, one, many = one + "s") => `${whole.format(count)} ${count === 1 ? one : many}`;

// Never 100 % for what is not all, never 0 % for what is not nothing.
function percent(part) {
  if (part === 0 || part === 1) return `${part * 100} %`;
  for (let digits = 1; digits <= 4; digits++) {
    const text = (part * 100).toFixed(digits);
    if (Number(text) !== 100 && Number(text) !== 0) return `${text} %`;
  }
  return part < 0.5 ? "< 0.0001 %" : "> 99.9999 %";
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// `draw` now, and again when the theme changes.
function onTheme(draw) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
}

// A canvas of this many CSS pixels, sharp on every screen.
function sized(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [across, down] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== across || canvas.height !== down) [canvas.width, canvas.height] = [across, down];
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

function channels(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

function mix(from, to, part) {
  const [low, high] = [channels(from), channels(to)];
  return `#${low.map((value, at) => Math.round(value + (high[at] - value) * part).toString(16).padStart(2, "0")).join("")}`;
}

function luminance(hex) {
  const [r, g, b] = channels(hex).map((value) => (value /= 255) <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

// Black or white, whichever can be read on this colour; on every one, one of them can.
const inkOn = (hex) => (luminance(hex) > 0.179 ? "#000000" : "#ffffff");
