/** The timeline of the batch: one line for each slot, time running to the left, phases drawn as they come. */

const WINDOW_MS = 10_000;
// Frames come ten times a second; the right edge lags a little more than that, so that it is never empty.
const LAG_MS = 180;
// Steps of one row and one phase that follow each other this closely are one stroke: between two steps the scheduler
// decides, which is nobody's idleness.
const JOIN_MS = 10;
const MAX_SLOTS = 64;
const GUTTER_PX = 26;

export class Timeline {
  #canvas;
  #spans = []; // for each slot, oldest first: {key, phase, from, to}
  #offset = null; // the page's clock minus the server's; the smallest seen, since delays only add to it
  #lastStep = -Infinity;
  #slots = 0;
  #scheduled = false;
  #stale = false; // something came since the last drawing
  #colours = {};

  constructor(canvas) {
    this.#canvas = canvas;
    const restyle = () => {
      this.#colours = {};
      this.#schedule();
    };
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", restyle);
    new ResizeObserver(restyle).observe(canvas);
  }

  /** Forget everything: another server has another clock. */
  reset() {
    this.#spans = [];
    this.#offset = null;
    this.#lastStep = -Infinity;
    this.#schedule();
  }

  /** Take a `batch` frame. */
  take(frame) {
    const offset = performance.now() - frame.t_ms;
    this.#offset = this.#offset === null ? offset : Math.min(this.#offset, offset);
    this.#slots = Math.min(frame.slots, MAX_SLOTS);
    while (this.#spans.length < this.#slots) this.#spans.push([]);
    for (const step of frame.steps) {
      const end = step.t_ms + step.ms;
      this.#lastStep = end;
      for (const [slot, key, phase] of step.rows) {
        if (slot >= this.#slots) continue;
        const spans = this.#spans[slot];
        const last = spans.at(-1);
        if (last && last.key === key && last.phase === phase && step.t_ms - last.to <= JOIN_MS) last.to = end;
        else spans.push({ key, phase, from: step.t_ms, to: end });
      }
    }
    this.#schedule();
  }

  #now() {
    return performance.now() - (this.#offset ?? 0) - LAG_MS;
  }

  /** Draw while anything moves; where motion is not wanted, once a second. */
  #schedule() {
    this.#stale = true;
    if (this.#scheduled) return;
    this.#scheduled = true;
    requestAnimationFrame(() => {
      this.#stale = false;
      this.#draw();
      // Not at the screen's full pace: where there is no graphics card, drawing takes the model's processor.
      const restMs = matchMedia("(prefers-reduced-motion: reduce)").matches ? 1000 : 30;
      setTimeout(() => {
        this.#scheduled = false;
        if (this.#stale || this.#now() - this.#lastStep < WINDOW_MS) this.#schedule();
      }, restMs);
    });
  }

  #colour(name) {
    return (this.#colours[name] ??= getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  }

  #draw() {
    const canvas = this.#canvas;
    const slotHeight = Math.max(5, Math.min(18, Math.floor(220 / Math.max(1, this.#slots))));
    const height = Math.max(1, this.#slots) * slotHeight + 16;
    const width = canvas.clientWidth;
    const scale = devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      canvas.style.height = `${height}px`;
    }
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    const now = this.#now();
    const begin = now - WINDOW_MS;
    const x = (t) => GUTTER_PX + ((t - begin) / WINDOW_MS) * (width - GUTTER_PX);
    context.font = "10px system-ui, sans-serif";
    context.textBaseline = "middle";
    for (let slot = 0; slot < this.#slots; slot++) {
      const top = slot * slotHeight;
      context.fillStyle = this.#colour("idle");
      context.fillRect(GUTTER_PX, top, width - GUTTER_PX, slotHeight - 1);
      if (slotHeight >= 9 || slot % 4 === 0) {
        context.fillStyle = this.#colour("soft");
        context.textAlign = "right";
        context.fillText(String(slot + 1), GUTTER_PX - 5, top + slotHeight / 2);
      }
      this.#drawSlot(context, this.#spans[slot], { top, height: slotHeight - 1, begin, now, x });
    }
    this.#drawAxis(context, { x, now, top: this.#slots * slotHeight, width });
  }

  #drawSlot(context, spans, { top, height, begin, now, x }) {
    while (spans.length > 0 && spans[0].to < begin) spans.shift();
    let before = null;
    for (const { key, phase, from, to } of spans) {
      if (from > now) break;
      const left = x(Math.max(from, begin));
      const right = Math.max(left + 1, x(Math.min(to, now)));
      if (phase === "held") {
        context.strokeStyle = this.#colour("held");
        context.strokeRect(left + 0.5, top + 0.5, Math.max(0, right - left - 1), height - 1);
      } else {
        context.fillStyle = phase === "kept" ? this.#hatch(context) : this.#colour(phase);
        context.fillRect(left, top, right - left, height);
      }
      if (before !== null && before !== key) {
        // Where one request follows another at once.
        context.fillStyle = this.#colour("card");
        context.fillRect(left - 1, top, 2, height);
      }
      before = key;
    }
  }

  #hatch(context) {
    if (this.#colours.hatch) return this.#colours.hatch;
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const ink = tile.getContext("2d");
    ink.fillStyle = this.#colour("kept");
    ink.fillRect(0, 0, 6, 6);
    ink.strokeStyle = this.#colour("idle");
    ink.lineWidth = 1.5;
    for (const shift of [-6, 0, 6]) {
      ink.beginPath();
      ink.moveTo(shift, 6);
      ink.lineTo(shift + 6, 0);
      ink.stroke();
    }
    return (this.#colours.hatch = context.createPattern(tile, "repeat"));
  }

  #drawAxis(context, { x, now, top, width }) {
    context.fillStyle = this.#colour("soft");
    context.textAlign = "center";
    const wide = width > 480;
    for (let seconds = wide ? 9 : 8; seconds > 0; seconds -= wide ? 1 : 2) {
      context.fillText(`−${seconds} s`, x(now - 1000 * seconds), top + 9);
    }
    context.textAlign = "right";
    context.fillText("now", width, top + 9);
  }
}
